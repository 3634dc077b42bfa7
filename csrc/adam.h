// Adam's data and arithmetic, shared by the host code, the CPU kernels and the CUDA kernels.
//
// One step of one element, in torch's order (arithmetic in fp32, in fp64 for fp64 parameters; every value is rounded to
// its storage type once):
//   g  = grad_factor * grad                       grad_factor = ±1 / grad_scale * clip coefficient
//   g += l2 * p                                   Adam:  l2 = weight_decay, decay = 1
//   m  = lerp(m, g, 1 - beta1)
//   v  = beta2 * v + (1 - beta2) * g * g
//   p  = p * decay - step_size * m / (sqrt(v) / sqrt(bias_correction2) + eps)
//                                                 AdamW: l2 = 0, decay = 1 - lr * weight_decay
// How p is then rounded to its dtype: see Rounding.
// Source: Kingma & Ba 2015 (arXiv:1412.6980), Loshchilov & Hutter 2019 (arXiv:1711.05101), Reddi et al. 2018 (AMSGrad,
// arXiv:1904.09237).
#pragma once

#include <cmath>
#include <cstdint>

#include "dtype.h"
#include "host_device.h"
#include "philox.h"

typedef struct CUstream_st* cudaStream_t;  // as in the CUDA headers, which only .cu files include

namespace fusedops::adam {

// What becomes of the part of a weight that the parameter's dtype can't hold.
enum class Rounding : uint8_t {
  kNearest,     // it is lost
  kMaster,      // the weight is kept in fp32, the parameter is its rounding
  kKahan,       // it is kept in a compensation of the parameter's dtype: weight = parameter + compensation
  kStochastic,  // bf16: it is the probability of rounding away from zero, so nothing is lost on average
};

// Which body of the CUDA kernel serves a tensor: the common dtype tuples are compiled for, any other is decided by
// uniform branches at run time.
enum class Path : uint8_t {
  kFloat,                  // param, grad, state fp32
  kBFloat,                 // all bf16
  kHalf,                   // all fp16
  kBFloatMaster,           // param, grad bf16; state, master fp32
  kHalfMaster,             // param, grad fp16; state, master fp32
  kBFloatMasterMainGrad,   // param bf16; grad, state, master fp32
  kBFloatState,            // param, grad bf16; state fp32
  kHalfState,              // param, grad fp16; state fp32
  kBFloatKahan,            // all bf16
  kBFloatStateKahan,       // param, grad bf16; state fp32
  kBFloatStochastic,       // all bf16
  kBFloatStateStochastic,  // param, grad bf16; state fp32
  kRuntime,                // any other tuple of 16- and 32-bit types, and amsgrad
  kElements,               // memory that no vector fits: one element at a time
  kDouble,                 // fp64 parameters, likewise
};

// Elements of one vector of a path: 16 bytes of the tuple's widest type.
FUSEDOPS_HOST_DEVICE constexpr int vector_elements(Path path) {
  return path == Path::kBFloat || path == Path::kHalf || path == Path::kBFloatKahan || path == Path::kBFloatStochastic
             ? 8
             : 4;
}

struct alignas(16) TensorRecord {
  void* param;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // of exp_avg_sq's dtype; null unless amsgrad
  void* companion;       // the fp32 master, or the compensation; null unless `rounding` is kMaster or kKahan
  float* step;
  int64_t numel;
  uint32_t index;  // of the parameter in its optimizer
  uint16_t group;
  DType param_dtype;
  DType grad_dtype;
  DType exp_avg_dtype;
  DType exp_avg_sq_dtype;
  Path path;
  Rounding rounding;
};
static_assert(sizeof(TensorRecord) == 80);

// A number, or where to read it when the step runs.
struct Number {
  double value;
  const void* tensor;  // device memory; null: value holds
  DType dtype;
};

// One group's hyper-parameters for one step.
struct GroupParams {
  Number lr;
  Number beta1;
  Number beta2;
  double eps;
  double weight_decay;
  uint64_t seed;  // of stochastic rounding
  bool decoupled;
  bool maximize;
};

// What concerns all groups of one step. Null pointers stand for absent tensors.
struct StepInputs {
  const float* grad_scale;
  const float* found_inf;
  const void* grad_norm;  // read only when clip
  double max_grad_norm;
  DType grad_norm_dtype;
  bool clip;
};

template <class T>
struct Coefficients {
  T grad_factor;
  T l2;
  T decay;
  T one_minus_beta1;
  T beta2;
  T one_minus_beta2;
  T rsqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  T eps;
  T step_size;  // lr / (1 - beta1^step)
};

// Which random bits a parameter's rounding takes in a step. One call of Philox serves eight elements, counted in the
// order in which they lie in memory: element 8 * octet + k has the half k % 2 (the lower first) of word k / 2.
struct Dither {
  uint32_t key[2];
  uint32_t index;
  uint32_t step;
};
constexpr int kOctet = 8;

struct alignas(16) Scalars {
  Dither dither;
  Coefficients<float> single;
  int32_t active;  // 0: nothing of this tensor changes (no gradient, or an inf was found)
  Coefficients<double> full;
};

FUSEDOPS_HOST_DEVICE double read_scalar(const void* pointer, DType dtype) {
  return dtype == DType::f64 ? *static_cast<const double*>(pointer)
                             : static_cast<double>(*static_cast<const float*>(pointer));
}

FUSEDOPS_HOST_DEVICE double read(const Number& number) {
  return number.tensor != nullptr ? read_scalar(number.tensor, number.dtype) : number.value;
}

FUSEDOPS_HOST_DEVICE double grad_factor(const StepInputs& inputs) {
  double factor = inputs.grad_scale != nullptr ? 1.0 / static_cast<double>(*inputs.grad_scale) : 1.0;
  if (inputs.clip) {
    const double coefficient = inputs.max_grad_norm / (read_scalar(inputs.grad_norm, inputs.grad_norm_dtype) + 1e-6);
    factor *= coefficient >= 1.0 ? 1.0 : coefficient;  // a NaN norm stays NaN, as in torch
  }
  return factor;
}

// What a tensor of the group needs; step is the number of this step, counted from 1.
FUSEDOPS_HOST_DEVICE Scalars scalars(const TensorRecord& record, const GroupParams& group, double factor, float step) {
  const double lr = read(group.lr), beta1 = read(group.beta1), beta2 = read(group.beta2);
  Coefficients<double> c;
  c.grad_factor = group.maximize ? -factor : factor;
  c.l2 = group.decoupled ? 0.0 : group.weight_decay;
  c.decay = group.decoupled ? 1.0 - lr * group.weight_decay : 1.0;
  c.one_minus_beta1 = 1.0 - beta1;
  c.beta2 = beta2;
  c.one_minus_beta2 = 1.0 - beta2;
  c.rsqrt_correction2 = 1.0 / sqrt(1.0 - pow(beta2, static_cast<double>(step)));
  c.eps = group.eps;
  c.step_size = lr / (1.0 - pow(beta1, static_cast<double>(step)));
  Scalars s;
  s.dither = {{static_cast<uint32_t>(group.seed), static_cast<uint32_t>(group.seed >> 32)},
              record.index,
              static_cast<uint32_t>(static_cast<int64_t>(step))};
  s.full = c;
  s.single = {
      static_cast<float>(c.grad_factor),       static_cast<float>(c.l2),    static_cast<float>(c.decay),
      static_cast<float>(c.one_minus_beta1),   static_cast<float>(c.beta2), static_cast<float>(c.one_minus_beta2),
      static_cast<float>(c.rsqrt_correction2), static_cast<float>(c.eps),   static_cast<float>(c.step_size)};
  s.active = 1;
  return s;
}

// Updates m, v and g (scratch), returns what the bias-corrected denominator is taken of.
template <class T>
FUSEDOPS_HOST_DEVICE void update_moments(T g, T p, T& m, T& v, const Coefficients<T>& c) {
  g *= c.grad_factor;
  if (c.l2 != T(0)) g += c.l2 * p;  // not 0 * inf
  // torch's lerp: from the nearer end, so that beta1 = 0 gives exactly g.
  const T gap = g - m;
  m = c.one_minus_beta1 < T(0.5) ? m + c.one_minus_beta1 * gap : g - (T(1) - c.one_minus_beta1) * gap;
  v = c.beta2 * v + c.one_minus_beta2 * g * g;
}

FUSEDOPS_HOST_DEVICE double root(double x) { return sqrt(x); }
FUSEDOPS_HOST_DEVICE double quotient(double a, double b) { return a / b; }

// On the device within one ULP and without the slow-path calls of the IEEE forms, which cost registers and keep loads
// from overlapping. 0, inf and NaN come out as IEEE's; a denominator below 2^-126 counts as 0.
FUSEDOPS_HOST_DEVICE float root(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return sqrtf(x);
#endif
}

FUSEDOPS_HOST_DEVICE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
  const float first = a * reciprocal;
  const float refined = fmaf(fmaf(-b, first, a), reciprocal, first);
  return refined == refined ? refined : first;  // inf * 0 in the refinement
#else
  return a / b;
#endif
}

template <class T>
FUSEDOPS_HOST_DEVICE T updated_param(T p, T m, T v, const Coefficients<T>& c) {
  const T denominator = root(v) * c.rsqrt_correction2 + c.eps;
  return p * c.decay - c.step_size * quotient(m, denominator);
}

// max that keeps a NaN of either side, as torch.maximum.
template <class T>
FUSEDOPS_HOST_DEVICE T maximum(T a, T b) {
  return (b > a || b != b) ? b : a;
}

// What rounding took from a weight; none where it overflowed, for inf - inf would be NaN ever after.
FUSEDOPS_HOST_DEVICE float lost(float weight, float rounded) {
  const float rest = weight - rounded;
  return rest - rest == 0.0f ? rest : 0.0f;
}

FUSEDOPS_HOST_DEVICE Words4 octet_bits(const Dither& dither, uint64_t octet) {
  const Words4 counter = {
      {static_cast<uint32_t>(octet), static_cast<uint32_t>(octet >> 32), dither.index, dither.step}};
  return philox(counter, dither.key[0], dither.key[1]);
}

FUSEDOPS_HOST_DEVICE uint32_t sixteen_bits(const Words4& octet, int element) {
  const uint32_t low = element % 4 < 2 ? octet.word[0] : octet.word[1];  // no indexing: words stay in registers
  const uint32_t high = element % 4 < 2 ? octet.word[2] : octet.word[3];
  return (element < 4 ? low : high) >> (element % 2 * 16) & 0xffffu;
}

// The fp32 number with these bits as bf16: away from zero where its lower half and the random bits add up to 2^16.
FUSEDOPS_HOST_DEVICE uint32_t stochastic_bfloat(uint32_t bits, uint32_t sixteen) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + sixteen) >> 16;
}

inline Path path_for_dtypes(const TensorRecord& r) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  if (r.max_exp_avg_sq != nullptr || r.exp_avg_dtype != r.exp_avg_sq_dtype) return Path::kRuntime;
  const auto is = [&](DType param, DType grad, DType state, Rounding rounding) {
    return r.param_dtype == param && r.grad_dtype == grad && r.exp_avg_dtype == state && r.rounding == rounding;
  };
  if (is(f32, f32, f32, Rounding::kNearest)) return Path::kFloat;
  if (is(bf16, bf16, bf16, Rounding::kNearest)) return Path::kBFloat;
  if (is(f16, f16, f16, Rounding::kNearest)) return Path::kHalf;
  if (is(bf16, bf16, f32, Rounding::kMaster)) return Path::kBFloatMaster;
  if (is(f16, f16, f32, Rounding::kMaster)) return Path::kHalfMaster;
  if (is(bf16, f32, f32, Rounding::kMaster)) return Path::kBFloatMasterMainGrad;
  if (is(bf16, bf16, f32, Rounding::kNearest)) return Path::kBFloatState;
  if (is(f16, f16, f32, Rounding::kNearest)) return Path::kHalfState;
  if (is(bf16, bf16, bf16, Rounding::kKahan)) return Path::kBFloatKahan;
  if (is(bf16, bf16, f32, Rounding::kKahan)) return Path::kBFloatStateKahan;
  if (is(bf16, bf16, bf16, Rounding::kStochastic)) return Path::kBFloatStochastic;
  if (is(bf16, bf16, f32, Rounding::kStochastic)) return Path::kBFloatStateStochastic;
  return Path::kRuntime;
}

inline Path choose_path(const TensorRecord& r) {
  if (r.param_dtype == DType::f64) return Path::kDouble;
  if (r.grad_dtype == DType::f64) return Path::kElements;
  const Path path = path_for_dtypes(r);
  const auto aligned = [&](const void* pointer, DType dtype) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(vector_elements(path) * size_of(dtype)) == 0;
  };
  const bool vectors = aligned(r.param, r.param_dtype) && aligned(r.exp_avg, r.exp_avg_dtype) &&
                       aligned(r.exp_avg_sq, r.exp_avg_sq_dtype) && aligned(r.max_exp_avg_sq, r.exp_avg_sq_dtype) &&
                       aligned(r.companion, r.rounding == Rounding::kMaster ? DType::f32 : r.param_dtype);
  return vectors ? path
                 : Path::kElements;  // the gradient's alignment may change from step to step: the kernel looks at it
}

}  // namespace fusedops::adam

namespace fusedops::cpu {

// Elements [begin, end) of one tensor.
void adam_update(const adam::TensorRecord& record, const void* grad, const adam::Scalars& scalars, int64_t begin,
                 int64_t end);

}  // namespace fusedops::cpu

namespace fusedops::cuda {

struct Chunk;

// Device memory of one plan on one stream.
struct AdamTables {
  const adam::TensorRecord* records;  // [tensors]
  const void* const* grads;           // [tensors], null: no gradient
  adam::Scalars* scalars;             // [tensors], written by the prologue
  const Chunk* chunks;                // [chunk_count]
  int64_t tensor_count;
  int64_t chunk_count;
  bool all_roundings;  // some record's is kKahan or kStochastic
};

// Elements of one chunk of the table that adam_step walks.
int64_t adam_chunk_size();

// Two launches, one more for every 32 groups past the first 32. Returns null, or what CUDA said of them.
const char* adam_step(const AdamTables& tables, const adam::GroupParams* groups, int64_t group_count,
                      const adam::StepInputs& inputs, cudaStream_t stream);

}  // namespace fusedops::cuda
