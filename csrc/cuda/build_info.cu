// What nvcc knows about this build, for _C.build_info().
#include "../build_info.h"

#include <cuda.h>

#define FUSEDOPS_STRING_(...) #__VA_ARGS__
#define FUSEDOPS_STRING(...) FUSEDOPS_STRING_(__VA_ARGS__)

namespace fusedops::cuda {

int toolkit_version() { return CUDA_VERSION; }

const char* arch_list() { return FUSEDOPS_STRING(__CUDA_ARCH_LIST__); }

}  // namespace fusedops::cuda
