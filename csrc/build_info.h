// What this binary was built with and for.
#pragma once

namespace fusedops {

namespace cpu {
// The instruction set that the CPU kernels run with on this machine: "avx512", "avx2" or "default".
const char* isa();
}  // namespace cpu

namespace cuda {
// CUDA toolkit version, as CUDA_VERSION spells it (13000 = 13.0).
int toolkit_version();
// Architectures in the binary, as nvcc's __CUDA_ARCH_LIST__ spells them ("800,900").
const char* arch_list();
}  // namespace cuda

}  // namespace fusedops
