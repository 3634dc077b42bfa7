// Tensors of rows as the ops over rows take them: dtypes, memory order, the way into the dispatcher.
#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>

#include "tensors.h"

namespace fusedops {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using OptDtype = std::optional<at::ScalarType>;

inline bool given(const OptTensor& t) { return t && t->defined(); }

inline DType dtype_code(const Arg& name, at::ScalarType dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_float_dtype(dtype), name,
                              ": expected dtype float32, float16, bfloat16 or float64, got ", dtype);
  return dtype_of(dtype);
}

inline at::ScalarType stats_dtype(at::ScalarType input_dtype) {
  return input_dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_double(const Arg& name, at::ScalarType dtype, const Tensor& input) {
  TORCH_CHECK_VALUE((dtype == at::kDouble) == (input.scalar_type() == at::kDouble), name,
                    ": expected float64 exactly when input is float64 (", input.scalar_type(), "), got ", dtype);
}

// ---- tensors to pointers --------------------------------------------------------------------------------------

// A tensor seen as [rows, hidden] with unit stride inside a row; copied only where its strides do not allow that.
struct Rows {
  Tensor tensor;  // keeps the copy alive
  int64_t stride;

  Rows(const Arg& name, const Tensor& source, size_t row_dims) : tensor(source), stride(collapse(source, row_dims)) {
    check_memory(name, source);
    if (stride >= 0) return;
    tensor = source.contiguous();
    stride = collapse(tensor, row_dims);
  }

 private:
  // The one stride between rows, or -1. Strides of dimensions of size one mean nothing and are passed over.
  static int64_t collapse(const Tensor& t, size_t row_dims) {
    const auto sizes = t.sizes();
    const auto strides = t.strides();
    const size_t lead = sizes.size() - row_dims;
    int64_t inner = 1;
    for (size_t d = sizes.size(); d-- > lead;) {
      if (sizes[d] == 1) continue;
      if (strides[d] != inner) return -1;
      inner *= sizes[d];
    }
    int64_t row_stride = inner, next = -1;
    for (size_t d = lead; d-- > 0;) {
      if (sizes[d] == 1) continue;
      if (next == -1) {
        row_stride = strides[d];
      } else if (strides[d] != next) {
        return -1;
      }
      next = strides[d] * sizes[d];
    }
    return row_stride;
  }
};

// Pointer, dtype and life of an optional [hidden] parameter.
struct Param {
  Tensor tensor;
  DType dtype = DType::f32;

  Param(const Arg& name, const OptTensor& param) {
    if (!given(param)) return;
    check_memory(name, *param);
    tensor = param->contiguous();
    dtype = dtype_code(name, tensor.scalar_type());
  }
  const void* data() const { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
};

inline void* data_or_null(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

// ---- into the dispatcher --------------------------------------------------------------------------------------

// The handle of an operator, looked up once, for calls that go straight into the dispatcher.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace fusedops
