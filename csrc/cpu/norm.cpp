#include "../norm.h"

#include <stdexcept>

namespace fusedops::cpu {

void norm_fwd(const NormFwd&) { throw std::runtime_error("the CPU norm kernels are not in this commit"); }
void norm_bwd(const NormBwd&) { throw std::runtime_error("the CPU norm kernels are not in this commit"); }

}  // namespace fusedops::cpu
