// Kernels of the Adam step: a prologue (one thread a tensor) that turns step counts and hyper-parameters into coefficients, and the update
// (one block a chunk) of every tensor of every group and dtype in one launch.
#pragma once

#include "../adam.h"
#include "../multi_tensor.h"
#include "raw.cuh"

namespace fusedops::cuda {

using adam::Coefficients;
using adam::GroupParams;
using adam::Path;
using adam::Scalars;
using adam::StepInputs;
using adam::TensorRecord;

struct PrologueArgs {
  static constexpr int kGroups = 64;
  const TensorRecord* records;  // [tensor_count]
  const void* const* grads;     // [tensor_count]
  Scalars* scalars;             // [tensor_count]
  int64_t tensor_count;
  int32_t first_group;          // groups[i] is group first_group + i
  int32_t group_count;
  StepInputs inputs;
  GroupParams groups[kGroups];
};
static_assert(sizeof(PrologueArgs) <= 4096);

__global__ void adam_prologue_kernel(const PrologueArgs args) {
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= args.tensor_count) return;
  const TensorRecord& record = args.records[t];
  const int g = int(record.group) - args.first_group;
  if (g < 0 || g >= args.group_count) return;
  if (args.grads[t] == nullptr || (args.inputs.found_inf != nullptr && *args.inputs.found_inf != 0.0f)) {
    args.scalars[t].active = 0;
    return;
  }
  const GroupParams& group = args.groups[g];
  const double lr = group.lr_tensor != nullptr ? adam::read_scalar(group.lr_tensor, group.lr_dtype) : group.lr;
  const float step = *record.step + 1.0f;
  args.scalars[t] = adam::scalars(adam::coefficients(group, lr, adam::grad_factor(args.inputs), step));
  *record.step = step;
}

// The dtypes of one tensor's tensors, known when compiling ...
template <DType kParam, DType kGrad, DType kState, bool kMaster>
struct FixedTypes {
  static constexpr DType param = kParam;
  static constexpr DType grad = kGrad;
  static constexpr DType exp_avg = kState;
  static constexpr DType exp_avg_sq = kState;
  static constexpr bool master = kMaster;
  static constexpr bool amsgrad = false;
};

// ... or read from its record: every branch on them is uniform in the block, and none stands between two loads.
struct RuntimeTypes {
  DType param;
  DType grad;
  DType exp_avg;
  DType exp_avg_sq;
  bool master;
  bool amsgrad;
};

// One chunk's tensors; pointers are at the chunk's first element.
struct ChunkPointers {
  char* param;
  const char* grad;
  char* exp_avg;
  char* exp_avg_sq;
  char* max_exp_avg_sq;
  char* master;
};

// Updates the whole vectors among the first count elements, returns how many elements they hold.
template <int kThreads, int kVec, int kUnroll, class Types>
__device__ __forceinline__ int update_vectors(const Types types, const ChunkPointers& at, int count, const Coefficients<float>& c) {
  constexpr int kStride = kThreads * kVec;
  const int end = count - count % kVec;
  const DType value_dtype = types.master ? DType::f32 : types.param;
  char* const values = types.master ? at.master : at.param;
  for (int base = int(threadIdx.x) * kVec; base < end; base += kUnroll * kStride) {
    Raw<kVec> value[kUnroll], grad[kUnroll], exp_avg[kUnroll], exp_avg_sq[kUnroll], largest[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kStride;
      if (i >= end) break;
      grad[u] = load_raw<kVec>(at.grad, i, types.grad);
      value[u] = load_raw<kVec>(values, i, value_dtype);
      exp_avg[u] = load_raw<kVec>(at.exp_avg, i, types.exp_avg);
      exp_avg_sq[u] = load_raw<kVec>(at.exp_avg_sq, i, types.exp_avg_sq);
      if (types.amsgrad) largest[u] = load_raw<kVec>(at.max_exp_avg_sq, i, types.exp_avg_sq);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kStride;
      if (i >= end) break;
      float g[kVec], p[kVec], m[kVec], v[kVec], top[kVec];
      unpack(g, grad[u], types.grad);
      unpack(p, value[u], value_dtype);
      unpack(m, exp_avg[u], types.exp_avg);
      unpack(v, exp_avg_sq[u], types.exp_avg_sq);
      if (types.amsgrad) unpack(top, largest[u], types.exp_avg_sq);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        adam::update_moments(g[k], p[k], m[k], v[k], c);
        if (types.amsgrad) top[k] = adam::maximum(top[k], v[k]);
        p[k] = adam::updated_param(p[k], m[k], types.amsgrad ? top[k] : v[k], c);
      }
      store_raw<kVec>(at.exp_avg, i, types.exp_avg, pack(m, types.exp_avg));
      store_raw<kVec>(at.exp_avg_sq, i, types.exp_avg_sq, pack(v, types.exp_avg_sq));
      if (types.amsgrad) store_raw<kVec>(at.max_exp_avg_sq, i, types.exp_avg_sq, pack(top, types.exp_avg_sq));
      if (types.master) store_raw<kVec>(at.master, i, DType::f32, pack(p, DType::f32));
      store_raw<kVec>(at.param, i, types.param, pack(p, types.param));
    }
  }
  return end;
}

// Any dtypes, any alignment: misaligned tensors, ends that fill no vector, and fp64.
template <int kThreads, class acc_t>
__device__ __forceinline__ void update_scalars(const TensorRecord& r, const ChunkPointers& at, int begin, int count, const Coefficients<acc_t>& c) {
  for (int i = begin + int(threadIdx.x); i < count; i += kThreads) {
    const acc_t g = load_one<acc_t>(at.grad, i, r.grad_dtype);
    acc_t p = r.master != nullptr ? acc_t(reinterpret_cast<float*>(at.master)[i]) : load_one<acc_t>(at.param, i, r.param_dtype);
    acc_t m = load_one<acc_t>(at.exp_avg, i, r.exp_avg_dtype);
    acc_t v = load_one<acc_t>(at.exp_avg_sq, i, r.exp_avg_sq_dtype);
    adam::update_moments(g, p, m, v, c);
    acc_t top = v;
    if (r.max_exp_avg_sq != nullptr) {
      top = adam::maximum(load_one<acc_t>(at.max_exp_avg_sq, i, r.exp_avg_sq_dtype), v);
      store_one(at.max_exp_avg_sq, i, r.exp_avg_sq_dtype, top);
    }
    p = adam::updated_param(p, m, top, c);
    store_one(at.exp_avg, i, r.exp_avg_dtype, m);
    store_one(at.exp_avg_sq, i, r.exp_avg_sq_dtype, v);
    if (r.master != nullptr) {
      const float master = float(p);
      reinterpret_cast<float*>(at.master)[i] = master;
      p = master;
    }
    store_one(at.param, i, r.param_dtype, p);
  }
}

template <int kVec>
__device__ __forceinline__ bool all_aligned(const TensorRecord& r, const void* grad) {
  return is_aligned<kVec>(grad, r.grad_dtype) && is_aligned<kVec>(r.param, r.param_dtype) && is_aligned<kVec>(r.exp_avg, r.exp_avg_dtype) &&
         is_aligned<kVec>(r.exp_avg_sq, r.exp_avg_sq_dtype) && is_aligned<kVec>(r.max_exp_avg_sq, r.exp_avg_sq_dtype) &&
         is_aligned<kVec>(r.master, DType::f32);
}

template <int kThreads, int kChunk, int kUnroll>
__device__ __forceinline__ void adam_chunk(const TensorRecord& r, const void* grad, const Scalars& s, int64_t first) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  const int64_t left = r.numel - first;
  const int count = left < kChunk ? int(left) : kChunk;
  const auto shift = [first](void* base, DType dtype) { return static_cast<char*>(base) + first * width_of(dtype); };
  const ChunkPointers at = {shift(r.param, r.param_dtype),
                            shift(const_cast<void*>(grad), r.grad_dtype),
                            shift(r.exp_avg, r.exp_avg_dtype),
                            shift(r.exp_avg_sq, r.exp_avg_sq_dtype),
                            shift(r.max_exp_avg_sq, r.exp_avg_sq_dtype),
                            shift(r.master, f32)};
  if (r.path == Path::kDouble) {
    const Coefficients<double> c = s.full;
    update_scalars<kThreads, double>(r, at, 0, count, c);
    return;
  }
  const Coefficients<float> c = s.single;
  const bool narrow = r.path == Path::kBFloat || r.path == Path::kHalf;  // all 16-bit: 8 elements to 16 bytes
  int done = 0;
  if (narrow ? all_aligned<8>(r, grad) : all_aligned<4>(r, grad)) {
    switch (r.path) {
      case Path::kFloat: done = update_vectors<kThreads, 4, kUnroll>(FixedTypes<f32, f32, f32, false>{}, at, count, c); break;
      case Path::kBFloat: done = update_vectors<kThreads, 8, kUnroll>(FixedTypes<bf16, bf16, bf16, false>{}, at, count, c); break;
      case Path::kHalf: done = update_vectors<kThreads, 8, kUnroll>(FixedTypes<f16, f16, f16, false>{}, at, count, c); break;
      case Path::kBFloatMaster: done = update_vectors<kThreads, 4, kUnroll>(FixedTypes<bf16, bf16, f32, true>{}, at, count, c); break;
      case Path::kHalfMaster: done = update_vectors<kThreads, 4, kUnroll>(FixedTypes<f16, f16, f32, true>{}, at, count, c); break;
      case Path::kBFloatMasterMainGrad: done = update_vectors<kThreads, 4, kUnroll>(FixedTypes<bf16, f32, f32, true>{}, at, count, c); break;
      case Path::kBFloatState: done = update_vectors<kThreads, 4, kUnroll>(FixedTypes<bf16, bf16, f32, false>{}, at, count, c); break;
      case Path::kHalfState: done = update_vectors<kThreads, 4, kUnroll>(FixedTypes<f16, f16, f32, false>{}, at, count, c); break;
      default:
        if (r.grad_dtype != DType::f64) {
          const RuntimeTypes types = {r.param_dtype,     r.grad_dtype,        r.exp_avg_dtype,
                                      r.exp_avg_sq_dtype, r.master != nullptr, r.max_exp_avg_sq != nullptr};
          done = update_vectors<kThreads, 4, 1>(types, at, count, c);
        }
    }
  }
  update_scalars<kThreads, float>(r, at, done, count, c);
}

template <int kThreads, int kBlocksPerSM, int kChunk, int kUnroll>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    adam_kernel(const TensorRecord* __restrict__ records, const void* const* __restrict__ grads, const Scalars* __restrict__ scalars,
                const Chunk* __restrict__ chunks) {
  const Chunk chunk = chunks[blockIdx.x];
  const TensorRecord& record = records[chunk.tensor];
  const void* const grad = grads[chunk.tensor];
  const Scalars& s = scalars[chunk.tensor];
  if (s.active == 0) return;
  adam_chunk<kThreads, kChunk, kUnroll>(record, grad, s, int64_t(chunk.index) * kChunk);
}

}  // namespace fusedops::cuda
