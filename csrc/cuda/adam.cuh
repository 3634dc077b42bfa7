// Kernels of the Adam step: a prologue (one thread a tensor) that turns step counts and hyper-parameters into
// coefficients, and the update (one block a chunk) of every tensor of every group and dtype in one launch.
#pragma once

#include "../adam.h"
#include "../multi_tensor.h"
#include "ptx.cuh"
#include "raw.cuh"

namespace fusedops::cuda {

using adam::Coefficients;
using adam::GroupParams;
using adam::Path;
using adam::Rounding;
using adam::Scalars;
using adam::StepInputs;
using adam::TensorRecord;

struct PrologueArgs {
  static constexpr int kGroups = 32;
  const TensorRecord* records;  // [tensor_count]
  const void* const* grads;     // [tensor_count]
  Scalars* scalars;             // [tensor_count]
  int64_t tensor_count;
  int32_t first_group;  // groups[i] is group first_group + i
  int32_t group_count;
  StepInputs inputs;
  GroupParams groups[kGroups];
};
static_assert(sizeof(PrologueArgs) <= 4096);

__global__ void adam_prologue_kernel(const PrologueArgs args) {
  allow_next_kernel();
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= args.tensor_count) return;
  const TensorRecord& record = args.records[t];
  const int g = int(record.group) - args.first_group;
  if (g < 0 || g >= args.group_count) return;
  if (args.grads[t] == nullptr || (args.inputs.found_inf != nullptr && *args.inputs.found_inf != 0.0f)) {
    args.scalars[t] = Scalars{};  // not active; whole, since whole is how it is read
    return;
  }
  const float step = *record.step + 1.0f;
  args.scalars[t] = adam::scalars(record, args.groups[g], adam::grad_factor(args.inputs), step);
  *record.step = step;
}

// The dtypes of one tensor's tensors, known when compiling ...
template <DType kParam, DType kGrad, DType kState, Rounding kRounding>
struct FixedTypes {
  static constexpr DType param = kParam;
  static constexpr DType grad = kGrad;
  static constexpr DType exp_avg = kState;
  static constexpr DType exp_avg_sq = kState;
  static constexpr Rounding rounding = kRounding;
  static constexpr bool amsgrad = false;
};

// ... or read from its record: every branch on them is uniform in the block, and none stands between two loads.
struct RuntimeTypes {
  DType param;
  DType grad;
  DType exp_avg;
  DType exp_avg_sq;
  Rounding rounding;
  bool amsgrad;
};

// What one block works on, in shared memory: registers are for the vectors in flight.
struct Tile {
  char* param;  // all pointers are at the chunk's first element; null where there is no such tensor
  char* exp_avg;
  char* exp_avg_sq;
  char* max_exp_avg_sq;
  char* companion;
  char* grad;
  Scalars scalars;
  RuntimeTypes types;
  int count;
  int64_t first;  // the chunk's first element in its tensor; a multiple of kOctet
  Path path;
};

// One thread fetches the record and others the scalars, each without branches between the loads: the block waits for
// memory once.
__device__ __forceinline__ void load_tile(Tile& tile, const TensorRecord& record, const void* const& grad,
                                          const Scalars& scalars, int64_t first, int chunk_size) {
  const int t = int(threadIdx.x);
  if (t == 0) {
    const TensorRecord r = record;
    const auto shifted = [first](const void* base, DType dtype) {
      return base != nullptr ? const_cast<char*>(static_cast<const char*>(base)) + first * size_of(dtype) : nullptr;
    };
    tile.grad = shifted(grad, r.grad_dtype);
    tile.param = shifted(r.param, r.param_dtype);
    tile.exp_avg = shifted(r.exp_avg, r.exp_avg_dtype);
    tile.exp_avg_sq = shifted(r.exp_avg_sq, r.exp_avg_sq_dtype);
    tile.max_exp_avg_sq = shifted(r.max_exp_avg_sq, r.exp_avg_sq_dtype);
    tile.companion = shifted(r.companion, r.rounding == Rounding::kMaster ? DType::f32 : r.param_dtype);
    tile.types = {r.param_dtype,      r.grad_dtype, r.exp_avg_dtype,
                  r.exp_avg_sq_dtype, r.rounding,   r.max_exp_avg_sq != nullptr};
    tile.path = r.path;
    tile.first = first;
    tile.count = int(r.numel - first < chunk_size ? r.numel - first : chunk_size);
  }
  wait_for_previous_kernel();  // the prologue, which writes the scalars; the tables are older
  constexpr int kWords = sizeof(Scalars) / sizeof(uint32_t);
  if (t >= 32 && t < 32 + kWords) {
    reinterpret_cast<uint32_t*>(&tile.scalars)[t - 32] = reinterpret_cast<const uint32_t*>(&scalars)[t - 32];
  }
  __syncthreads();
}

// kVec values as bf16; element i is one of the first kOctet / kVec parts of an octet.
template <int kVec>
__device__ __forceinline__ Raw<kVec> pack_stochastic(const float (&in)[kVec], const adam::Dither& dither, int64_t i) {
  const Words4 bits = adam::octet_bits(dither, uint64_t(i) / adam::kOctet);
  const bool second = kVec < adam::kOctet && i % adam::kOctet != 0;  // no indexing: the words stay in registers
  Raw<kVec> raw;
#pragma unroll
  for (int k = 0; k < kVec / 2; ++k) {
    const uint32_t word = second ? bits.word[(k + 2) % 4] : bits.word[k];
    raw.word[k] = adam::stochastic_bfloat(bit_cast<uint32_t>(in[2 * k]), word & 0xffffu) |
                  adam::stochastic_bfloat(bit_cast<uint32_t>(in[2 * k + 1]), word >> 16) << 16;
  }
  return raw;
}

// Writes kVec updated weights (overwriting p) as the tensor's rounding says; see adam_kernel for kAll.
template <bool kAll, int kVec, class Types>
__device__ __forceinline__ void store_weights(const Types& types, const Tile& tile, int i, float (&p)[kVec]) {
  if (types.rounding == Rounding::kMaster) store_raw<kVec>(tile.companion, i, DType::f32, pack(p, DType::f32));
  const Raw<kVec> rounded = kAll && types.rounding == Rounding::kStochastic
                                ? pack_stochastic<kVec>(p, tile.scalars.dither, tile.first + i)
                                : pack(p, types.param);
  store_raw<kVec>(tile.param, i, types.param, rounded);
  if (!kAll || types.rounding != Rounding::kKahan) return;
  float held[kVec];
  unpack(held, rounded, types.param);
#pragma unroll
  for (int k = 0; k < kVec; ++k) p[k] = adam::lost(p[k], held[k]);
  store_raw<kVec>(tile.companion, i, types.param, pack(p, types.param));
}

// Updates the whole vectors of a tile, returns how many elements they hold.
template <bool kAll, int kThreads, int kVec, int kUnroll, class Types>
__device__ __forceinline__ int update_vectors(const Types& types, const Tile& tile) {
  constexpr int kStride = kThreads * kVec;
  const int end = tile.count - tile.count % kVec;
  const bool master = types.rounding == Rounding::kMaster, kahan = kAll && types.rounding == Rounding::kKahan;
  const DType value_dtype = master ? DType::f32 : types.param;
  for (int base = int(threadIdx.x) * kVec; base < end; base += kUnroll * kStride) {
    Raw<kVec> value[kUnroll], grad[kUnroll], exp_avg[kUnroll], exp_avg_sq[kUnroll], largest[kUnroll], rest[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kStride;
      if (i >= end) continue;
      grad[u] = load_raw<kVec>(tile.grad, i, types.grad);
      value[u] = load_raw<kVec>(master ? tile.companion : tile.param, i, value_dtype);
      exp_avg[u] = load_raw<kVec>(tile.exp_avg, i, types.exp_avg);
      exp_avg_sq[u] = load_raw<kVec>(tile.exp_avg_sq, i, types.exp_avg_sq);
      if (types.amsgrad) largest[u] = load_raw<kVec>(tile.max_exp_avg_sq, i, types.exp_avg_sq);
      if (kahan) rest[u] = load_raw<kVec>(tile.companion, i, types.param);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kStride;
      if (i >= end) continue;
      float g[kVec], p[kVec], m[kVec], v[kVec], top[kVec];
      unpack(p, value[u], value_dtype);
      if (kahan) {
        unpack(g, rest[u], types.param);
#pragma unroll
        for (int k = 0; k < kVec; ++k) p[k] += g[k];
      }
      unpack(g, grad[u], types.grad);
      unpack(m, exp_avg[u], types.exp_avg);
      unpack(v, exp_avg_sq[u], types.exp_avg_sq);
      if (types.amsgrad) unpack(top, largest[u], types.exp_avg_sq);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        adam::update_moments(g[k], p[k], m[k], v[k], tile.scalars.single);
        if (types.amsgrad) top[k] = adam::maximum(top[k], v[k]);
        p[k] = adam::updated_param(p[k], m[k], types.amsgrad ? top[k] : v[k], tile.scalars.single);
      }
      store_raw<kVec>(tile.exp_avg, i, types.exp_avg, pack(m, types.exp_avg));
      store_raw<kVec>(tile.exp_avg_sq, i, types.exp_avg_sq, pack(v, types.exp_avg_sq));
      if (types.amsgrad) store_raw<kVec>(tile.max_exp_avg_sq, i, types.exp_avg_sq, pack(top, types.exp_avg_sq));
      store_weights<kAll>(types, tile, i, p);
    }
  }
  return end;
}

// One weight, likewise.
template <bool kAll, class acc_t>
__device__ __forceinline__ void store_weight(const Tile& tile, int i, acc_t p) {
  const RuntimeTypes& types = tile.types;
  if (kAll && types.rounding == Rounding::kStochastic) {
    const int64_t element = tile.first + i;
    const Words4 bits = adam::octet_bits(tile.scalars.dither, uint64_t(element) / adam::kOctet);
    reinterpret_cast<uint16_t*>(tile.param)[i] = uint16_t(
        adam::stochastic_bfloat(bit_cast<uint32_t>(float(p)), adam::sixteen_bits(bits, int(element % adam::kOctet))));
    return;
  }
  store_one(tile.param, i, types.param, p);  // fp32 arithmetic: the parameter rounds the value its master has
  if (types.rounding == Rounding::kMaster) store_one(tile.companion, i, DType::f32, p);
  if (kAll && types.rounding == Rounding::kKahan) {
    store_one(tile.companion, i, types.param, adam::lost(float(p), load_one<float>(tile.param, i, types.param)));
  }
}

// Any dtypes, any alignment: misaligned tensors, ends that fill no vector, and fp64.
template <bool kAll, int kThreads, class acc_t>
__device__ __forceinline__ void update_elements(const Tile& tile, const Coefficients<acc_t>& c, int begin) {
  const RuntimeTypes& types = tile.types;
  for (int i = begin + int(threadIdx.x); i < tile.count; i += kThreads) {
    const acc_t g = load_one<acc_t>(tile.grad, i, types.grad);
    acc_t p = types.rounding == Rounding::kMaster ? load_one<acc_t>(tile.companion, i, DType::f32)
                                                  : load_one<acc_t>(tile.param, i, types.param);
    if (kAll && types.rounding == Rounding::kKahan) p += load_one<acc_t>(tile.companion, i, types.param);
    acc_t m = load_one<acc_t>(tile.exp_avg, i, types.exp_avg);
    acc_t v = load_one<acc_t>(tile.exp_avg_sq, i, types.exp_avg_sq);
    acc_t top = types.amsgrad ? load_one<acc_t>(tile.max_exp_avg_sq, i, types.exp_avg_sq) : acc_t(0);
    adam::update_moments(g, p, m, v, c);
    top = types.amsgrad ? adam::maximum(top, v) : v;
    p = adam::updated_param(p, m, top, c);
    store_one(tile.exp_avg, i, types.exp_avg, m);
    store_one(tile.exp_avg_sq, i, types.exp_avg_sq, v);
    if (types.amsgrad) store_one(tile.max_exp_avg_sq, i, types.exp_avg_sq, top);
    store_weight<kAll>(tile, i, p);
  }
}

template <bool kAll, int kThreads, int kUnroll>
__device__ __forceinline__ void update_tile(const Tile& tile) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  constexpr Rounding nearest = Rounding::kNearest, master = Rounding::kMaster;
  constexpr Rounding kahan = Rounding::kKahan, stochastic = Rounding::kStochastic;
  if (tile.path == Path::kDouble) return update_elements<kAll, kThreads, double>(tile, tile.scalars.full, 0);
  int done = 0;
  if (reinterpret_cast<uintptr_t>(tile.grad) % (adam::vector_elements(tile.path) * size_of(tile.types.grad)) == 0) {
    switch (tile.path) {
      case Path::kFloat:
        done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<f32, f32, f32, nearest>{}, tile);
        break;
      case Path::kBFloat:
        done = update_vectors<kAll, kThreads, 8, (kUnroll + 1) / 2>(FixedTypes<bf16, bf16, bf16, nearest>{}, tile);
        break;
      case Path::kHalf:
        done = update_vectors<kAll, kThreads, 8, (kUnroll + 1) / 2>(FixedTypes<f16, f16, f16, nearest>{}, tile);
        break;
      case Path::kBFloatMaster:
        done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<bf16, bf16, f32, master>{}, tile);
        break;
      case Path::kHalfMaster:
        done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<f16, f16, f32, master>{}, tile);
        break;
      case Path::kBFloatMasterMainGrad:
        done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<bf16, f32, f32, master>{}, tile);
        break;
      case Path::kBFloatState:
        done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<bf16, bf16, f32, nearest>{}, tile);
        break;
      case Path::kHalfState:
        done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<f16, f16, f32, nearest>{}, tile);
        break;
      case Path::kRuntime: done = update_vectors<kAll, kThreads, 4, 1>(tile.types, tile); break;
      default: break;
    }
    if constexpr (kAll) {
      switch (tile.path) {
        case Path::kBFloatKahan:
          done = update_vectors<kAll, kThreads, 8, 1>(FixedTypes<bf16, bf16, bf16, kahan>{}, tile);
          break;
        case Path::kBFloatStateKahan:
          done = update_vectors<kAll, kThreads, 4, kUnroll>(FixedTypes<bf16, bf16, f32, kahan>{}, tile);
          break;
        case Path::kBFloatStochastic:
          done = update_vectors<kAll, kThreads, 8, 1>(FixedTypes<bf16, bf16, bf16, stochastic>{}, tile);
          break;
        case Path::kBFloatStateStochastic:
          done = update_vectors<kAll, kThreads, 4, 1>(FixedTypes<bf16, bf16, f32, stochastic>{}, tile);
          break;
        default: break;
      }
    }
  }
  if (done < tile.count) update_elements<kAll, kThreads, float>(tile, tile.scalars.single, done);
}

// kAll: tensors with kahan_sum or stochastic rounding too, which take more registers than the others should pay for.
template <bool kAll, int kThreads, int kBlocksPerSM, int kChunk, int kUnroll>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) adam_kernel(const AdamTables tables) {
  __shared__ Tile tile;
  const Chunk chunk = tables.chunks[blockIdx.x];
  const uint32_t t = chunk.tensor;
  load_tile(tile, tables.records[t], tables.grads[t], tables.scalars[t], int64_t(chunk.index) * kChunk, kChunk);
  if (tile.scalars.active != 0) update_tile<kAll, kThreads, kUnroll>(tile);
}

}  // namespace fusedops::cuda
