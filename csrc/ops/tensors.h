// Tensors to what the kernels take: dtype codes, memory order, the current stream, and launch errors.
#pragma once

#include <ostream>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../dtype.h"

typedef struct CUstream_st* cudaStream_t;  // as in the CUDA headers, which only .cu files include

namespace fusedops {

inline bool is_float_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

// Of a dtype that passed is_float_dtype.
inline DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return DType::f64;
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    default: return DType::f16;
  }
}

inline DType dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

// An argument as errors name it: "layer_norm: weight".
struct Arg {
  const char* op;
  const char* name;
};

inline std::ostream& operator<<(std::ostream& out, const Arg& arg) { return out << arg.op << ": " << arg.name; }

// A pointer alone does not tell: a view into freed storage still has its offset.
template <class Name>
void check_memory(const Name& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.unsafeGetTensorImpl()->storage_initialized(), name, ": expected a tensor with storage, got ",
                    tensor.sizes(), " whose storage was freed");
}

// A one-element tensor that the kernels read or write on their device.
inline void check_scalar(const char* name, const at::Tensor& tensor, c10::Device device, bool allow_double) {
  TORCH_CHECK_VALUE(tensor.numel() == 1 && tensor.device() == device &&
                        (tensor.scalar_type() == at::kFloat || (allow_double && tensor.scalar_type() == at::kDouble)),
                    name, ": expected a one-element float32", allow_double ? " or float64" : "", " tensor on ", device,
                    ", got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device());
}

inline void check_device_is_served(c10::Device device) {
#ifdef FUSEDOPS_WITH_CUDA
  const bool served = device.is_cpu() || device.is_cuda();
#else
  const bool served = device.is_cpu();
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(served, "device: the native backend was not built for ", device);
}

// Asked for without a CUDA header: the same source builds against any torch.
inline cudaStream_t current_stream(c10::Device device) {
  return static_cast<cudaStream_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

inline void check_launch(const char* error) { TORCH_CHECK(error == nullptr, "fusedops: CUDA launch failed: ", error); }

}  // namespace fusedops
