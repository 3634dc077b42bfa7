// Element types as the kernels know them: raw pointers carry one of these beside them.
#pragma once

#include "host_device.h"

namespace fusedops {

enum class DType : unsigned char { f32, f16, bf16, f64 };

FUSEDOPS_HOST_DEVICE int size_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32: return 4;
    default: return 2;
  }
}

}  // namespace fusedops
