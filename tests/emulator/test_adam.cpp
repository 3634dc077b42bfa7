// The kernels of the Adam engine and their launchers, emulated, against a double loop. Exits 1 with a line for each
// failure.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "adam.h"
#include "multi_tensor.h"

using fusedops::DType;
using fusedops::TensorSpan;
using fusedops::adam::Rounding;
namespace adam = fusedops::adam;
namespace cuda = fusedops::cuda;

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

namespace {

constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16, f64 = DType::f64;
constexpr Rounding nearest = Rounding::kNearest, master = Rounding::kMaster, kahan = Rounding::kKahan,
                   stochastic = Rounding::kStochastic;

int failures = 0, checks = 0;
std::mt19937 generator(0);

void expect(bool ok, const char* what, int tensor, int64_t element = -1) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) printf("FAIL %s, tensor %d, element %ld\n", what, tensor, static_cast<long>(element));
}

// Elements of a run-time dtype. `skew` elements before the first misalign them; the allocation ends with the last one,
// so that AddressSanitizer sees any access beyond.
struct Array {
  DType dtype = f32;
  int64_t n = 0, skew = 0;
  std::unique_ptr<unsigned char[]> bytes;

  Array() = default;
  Array(DType dtype, int64_t n, int64_t skew, double scale, bool square) : dtype(dtype), n(n), skew(skew) {
    bytes.reset(new unsigned char[(n + skew) * size_of(dtype)]);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < n; ++i) {
      const double x = normal(generator) * scale;
      set(i, square ? x * x : x);
    }
  }
  void* data() const { return bytes ? bytes.get() + skew * size_of(dtype) : nullptr; }
  double get(int64_t i) const {
    const void* p = bytes.get() + (skew + i) * size_of(dtype);
    switch (dtype) {
      case f64: return *static_cast<const double*>(p);
      case f32: return *static_cast<const float*>(p);
      case f16: return __half2float(*static_cast<const __half*>(p));
      default: return __bfloat162float(*static_cast<const __nv_bfloat16*>(p));
    }
  }
  void set(int64_t i, double x) {
    void* p = bytes.get() + (skew + i) * size_of(dtype);
    switch (dtype) {
      case f64: *static_cast<double*>(p) = x; break;
      case f32: *static_cast<float*>(p) = static_cast<float>(x); break;
      case f16: *static_cast<__half*>(p) = __float2half_rn(static_cast<float>(x)); break;
      default: *static_cast<__nv_bfloat16*>(p) = __float2bfloat16_rn(static_cast<float>(x));
    }
  }
  double unit() const { return std::ldexp(1.0, dtype == f64 ? -53 : dtype == f32 ? -24 : dtype == f16 ? -11 : -8); }
  std::vector<double> values() const {
    std::vector<double> all(n);
    for (int64_t i = 0; i < n; ++i) all[i] = get(i);
    return all;
  }
};

struct Types {
  DType param, grad, exp_avg, exp_avg_sq;
  Rounding rounding;
  bool amsgrad;
};

struct Tensor {
  Types types;
  int group;
  bool has_grad;
  Array param, grad, exp_avg, exp_avg_sq, largest, companion;
  float step;
};

Tensor make(const Types& types, int64_t n, int64_t skew, int64_t grad_skew, int group, bool has_grad) {
  Tensor t{types,
           group,
           has_grad,
           {types.param, n, skew, 1.0, false},
           {types.grad, n, grad_skew, 0.5, false},
           {types.exp_avg, n, skew, 0.1, false},
           {types.exp_avg_sq, n, skew, 0.3, true},
           {},
           {},
           3.0f};
  if (types.amsgrad) t.largest = Array(types.exp_avg_sq, n, skew, 0.3, true);
  if (types.rounding == master) t.companion = Array(f32, n, skew, 1.0, false);
  if (types.rounding == kahan) t.companion = Array(types.param, n, skew, 0.001, false);
  return t;
}

adam::TensorRecord record_of(Tensor& t) {
  adam::TensorRecord r = {t.param.data(),
                          t.exp_avg.data(),
                          t.exp_avg_sq.data(),
                          t.largest.data(),
                          t.companion.data(),
                          &t.step,
                          t.param.n,
                          1000u + static_cast<uint32_t>(t.group),
                          static_cast<uint16_t>(t.group),
                          t.types.param,
                          t.types.grad,
                          t.types.exp_avg,
                          t.types.exp_avg_sq,
                          {},
                          t.types.rounding};
  r.path = adam::choose_path(r);
  return r;
}

// Device tables, made by the launchers under test.
struct Tables {
  std::vector<adam::TensorRecord> records;
  std::vector<const void*> grads;
  std::vector<adam::Scalars> scalars;
  std::vector<uint32_t> first{0};
  std::vector<cuda::Chunk> chunks;
};

const char* build_chunks(const std::vector<int64_t>& numels, int64_t size, std::vector<uint32_t>& first,
                         std::vector<cuda::Chunk>& chunks) {
  first = {0};
  for (const int64_t n : numels) first.push_back(first.back() + static_cast<uint32_t>((n + size - 1) / size));
  std::vector<uint32_t> device_first(first.size());
  chunks.resize(first.back());
  if (const char* error = cuda::upload(device_first.data(), first.data(), first.size() * sizeof(uint32_t), nullptr))
    return error;
  return cuda::expand_chunks({chunks.data(), device_first.data(), static_cast<int64_t>(numels.size()), first.back()},
                             nullptr);
}

// One step of all tensors through the launchers.
void run_step(std::vector<Tensor>& tensors, const std::vector<adam::GroupParams>& groups,
              const adam::StepInputs& inputs) {
  std::vector<adam::TensorRecord> host;
  std::vector<const void*> host_grads;
  std::vector<int64_t> numels;
  for (Tensor& t : tensors) {
    host.push_back(record_of(t));
    host_grads.push_back(!t.has_grad ? nullptr : t.grad.n == 0 ? reinterpret_cast<void*>(16) : t.grad.data());
    numels.push_back(t.param.n);
  }
  Tables tables;
  tables.records.resize(host.size());
  tables.grads.resize(host.size());
  tables.scalars.resize(host.size());
  const char* error = cuda::upload(tables.records.data(), host.data(), host.size() * sizeof(host[0]), nullptr);
  if (!error) error = cuda::upload(tables.grads.data(), host_grads.data(), host_grads.size() * sizeof(void*), nullptr);
  if (!error) error = build_chunks(numels, cuda::adam_chunk_size(), tables.first, tables.chunks);
  const bool all = std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) {
    return t.types.rounding == kahan || t.types.rounding == stochastic;
  });
  if (!error) {
    error = cuda::adam_step({tables.records.data(), tables.grads.data(), tables.scalars.data(), tables.chunks.data(),
                             static_cast<int64_t>(host.size()), tables.first.back(), all},
                            groups.data(), static_cast<int64_t>(groups.size()), inputs, nullptr);
  }
  expect(error == nullptr, error ? error : "launch", -1);
}

void check_step(std::vector<Tensor>& tensors, const std::vector<adam::GroupParams>& groups, float* scale,
                float* found_inf, float* norm) {
  struct Before {
    std::vector<double> p, g, m, v, top, w;
    float step;
  };
  std::vector<Before> before;
  for (const Tensor& t : tensors) {
    before.push_back({t.param.values(), t.grad.values(), t.exp_avg.values(), t.exp_avg_sq.values(), t.largest.values(),
                      t.companion.values(), t.step});
  }
  run_step(tensors, groups, {scale, found_inf, norm, 0.5, f32, norm != nullptr});

  const bool skipped = found_inf != nullptr && *found_inf != 0;
  for (int k = 0; k < static_cast<int>(tensors.size()); ++k) {
    const Tensor& t = tensors[k];
    const Before& b = before[k];
    const adam::GroupParams& group = groups[t.group];
    expect(t.grad.values() == b.g, "gradient untouched", k);
    if (skipped || !t.has_grad) {
      expect(t.param.values() == b.p && t.exp_avg.values() == b.m && t.exp_avg_sq.values() == b.v &&
                 t.largest.values() == b.top && t.companion.values() == b.w && t.step == b.step,
             "a skipped tensor is untouched", k);
      continue;
    }
    expect(t.step == b.step + 1, "step", k);
    const double lr = adam::read(group.lr), beta1 = adam::read(group.beta1), beta2 = adam::read(group.beta2);
    double factor = scale ? 1.0 / *scale : 1.0;
    if (norm) factor *= std::min(1.0, 0.5 / (*norm + 1e-6));
    const double u = t.types.param == f64 ? std::ldexp(1.0, -50) : std::ldexp(1.0, -21);  // a few fp32 roundings
    for (int64_t i = 0; i < t.param.n; ++i) {
      const double p0 = t.types.rounding == master ? b.w[i] : t.types.rounding == kahan ? b.p[i] + b.w[i] : b.p[i];
      const double raw = b.g[i] * factor * (group.maximize ? -1 : 1);
      const double g = group.decoupled ? raw : raw + group.weight_decay * p0;
      const double m = b.m[i] + (1 - beta1) * (g - b.m[i]);
      const double v = beta2 * b.v[i] + (1 - beta2) * g * g;
      const double top = t.types.amsgrad ? std::max(b.top[i], v) : v;
      const double size = std::abs(raw) + std::abs(group.weight_decay * p0);  // of what may cancel in g
      const double m_error = u * (std::abs(b.m[i]) + size), v_error = u * (b.v[i] + size * size);
      const double denominator = std::sqrt(top / (1 - std::pow(beta2, t.step))) + group.eps;
      const double rate = lr / (1 - std::pow(beta1, t.step));
      const double p = p0 * (group.decoupled ? 1 - lr * group.weight_decay : 1) - rate * m / denominator;
      const double p_error = u * std::abs(p0) + rate * (m_error + std::abs(m) * (u + v_error / top)) / denominator;
      const auto near = [&](const Array& a, double want, double error, double roundings = 1) {
        const double smallest = a.dtype == f16 ? std::ldexp(1.0, -25) : 0;  // half a subnormal
        return std::abs(a.get(i) - want) <= error + roundings * a.unit() * std::abs(want) + smallest;
      };
      expect(near(t.exp_avg, m, m_error), "exp_avg", k, i);
      expect(near(t.exp_avg_sq, v, v_error), "exp_avg_sq", k, i);
      if (t.types.amsgrad) expect(near(t.largest, top, v_error), "max_exp_avg_sq", k, i);
      if (t.types.rounding == master) {
        expect(near(t.companion, p, p_error), "master", k, i);
        Array rounded(t.types.param, 1, 0, 0, false);
        rounded.set(0, t.companion.get(i));
        expect(rounded.get(0) == t.param.get(i), "param = round(master)", k, i);
      } else {
        expect(near(t.param, p, p_error, t.types.rounding == stochastic ? 2 : 1), "param", k, i);
      }
      if (t.types.rounding == kahan) expect(near(t.companion, p - t.param.get(i), p_error), "compensation", k, i);
    }
  }
}

// Weights that fp32 holds exactly, p - lr * ±1: each must be rounded by its own bits.
void check_stochastic_bits(DType state, int64_t skew) {
  const double lr = 0.0371f;
  std::vector<adam::GroupParams> groups = {
      {{lr, nullptr, f64}, {0, nullptr, f64}, {0, nullptr, f64}, 0, 0, 0x123456789abcdef0u, true, false}};
  std::vector<Tensor> tensors;
  for (const int64_t n : {int64_t{1}, int64_t{12}, int64_t{1030}, 2 * cuda::adam_chunk_size() + 13}) {
    tensors.push_back(make({bf16, bf16, state, state, stochastic, false}, n, skew, skew, 0, true));
    Tensor& t = tensors.back();
    for (int64_t i = 0; i < n; ++i) t.grad.set(i, i % 3 ? 1.0 : -1.0);
  }
  std::vector<std::vector<double>> before;
  for (const Tensor& t : tensors) before.push_back(t.param.values());
  run_step(tensors, groups, {});
  for (int k = 0; k < static_cast<int>(tensors.size()); ++k) {
    for (int64_t i = 0; i < tensors[k].param.n; ++i) {
      const float weight = static_cast<float>(before[k][i] - lr * tensors[k].grad.get(i));
      const fusedops::Words4 words =
          adam::octet_bits({{0x9abcdef0u, 0x12345678u}, 1000, 4}, static_cast<uint64_t>(i / 8));
      uint32_t bits;
      memcpy(&bits, &weight, sizeof bits);
      bits = (bits + (words.word[i % 8 / 2] >> (i % 2 ? 16 : 0) & 0xffff)) & 0xffff0000;
      float want;
      memcpy(&want, &bits, sizeof want);
      expect(tensors[k].param.get(i) == want, "stochastic rounding", k, i);
    }
  }
}

void check_norm_and_scale(const std::vector<DType>& dtypes, int64_t skew, float* scale, bool with_inf) {
  constexpr int64_t kChunk = 4096;
  std::vector<Array> grads;
  std::vector<TensorSpan> spans;
  std::vector<int64_t> numels;
  double sum = 0;
  for (const DType dtype : dtypes) {
    for (const int64_t n : {1, 7, 4096, 9001}) {
      grads.emplace_back(dtype, n, skew, 1.0, false);
      for (const double x : grads.back().values()) sum += x / (scale ? *scale : 1.0) * x / (scale ? *scale : 1.0);
      spans.push_back({grads.back().data(), static_cast<uint64_t>(n), static_cast<uint64_t>(dtype)});
      numels.push_back(n);
    }
  }
  if (with_inf) grads.back().set(grads.back().n - 1, INFINITY);
  std::vector<uint32_t> first;
  std::vector<cuda::Chunk> chunks;
  build_chunks(numels, kChunk, first, chunks);
  std::vector<double> partials(first.back());
  float found_inf = 0;
  double norm = -1;
  const cuda::GradNormArgs args = {spans.data(), chunks.data(),   first.back(), kChunk, scale,
                                   &found_inf,   partials.data(), &norm,        f64};
  expect(cuda::grad_norm(args, nullptr) == nullptr, "norm launch", -1);
  expect((found_inf == 1) == with_inf, "found_inf", -1);
  if (with_inf) return;
  expect(std::abs(norm - std::sqrt(sum)) <= 1e-6 * norm, "norm", -1);

  for (const float coef : {1.0f, 0.3f}) {
    std::vector<std::vector<double>> before;
    for (const Array& g : grads) before.push_back(g.values());
    expect(cuda::grad_scale({spans.data(), chunks.data(), first.back(), kChunk, &coef, f32}, nullptr) == nullptr,
           "scale launch", -1);
    for (int k = 0; k < static_cast<int>(grads.size()); ++k) {
      for (int64_t i = 0; i < grads[k].n; ++i) {
        Array want(grads[k].dtype, 1, 0, 0, false);
        want.set(0, grads[k].dtype == f64 ? before[k][i] * coef : static_cast<float>(before[k][i]) * coef);
        expect(grads[k].get(i) == want.get(0), "scaled gradient", k, i);
      }
    }
  }
}

}  // namespace

int main() {
  const std::vector<Types> tuples = {
      {f32, f32, f32, f32, nearest, false},      {bf16, bf16, bf16, bf16, nearest, false},
      {f16, f16, f16, f16, nearest, false},      {bf16, bf16, f32, f32, master, false},
      {f16, f16, f32, f32, master, false},       {bf16, f32, f32, f32, master, false},
      {bf16, bf16, f32, f32, nearest, false},    {f16, f16, f32, f32, nearest, false},
      {f32, f32, f32, f32, nearest, true},       {f32, bf16, bf16, f16, nearest, true},
      {bf16, f64, f32, f32, master, true},       {f64, f64, f64, f64, nearest, true},
      {f64, f32, f32, f64, nearest, false},      {bf16, bf16, bf16, bf16, kahan, false},
      {bf16, bf16, f32, f32, kahan, false},      {f16, f16, f32, f32, kahan, true},
      {f16, f16, f16, f16, kahan, false},        {bf16, bf16, bf16, bf16, stochastic, false},
      {bf16, bf16, f32, f32, stochastic, false}, {bf16, f32, f16, f32, stochastic, true},
  };
  double beta1 = 0.8;
  float lr = 0.02f, beta2 = 0.95f, scale = 8.0f, clean = 0.0f, dirty = 1.0f, norm = 3.0f;
  std::vector<adam::GroupParams> groups(70);  // more than one prologue takes
  for (int g = 0; g < 70; ++g) {
    groups[g] = {{0.01, nullptr, f64}, {0.9, nullptr, f64}, {0.999, nullptr, f64}, 1e-8, 0.1, 7,
                 g % 2 == 0,           g % 3 == 0};
  }
  groups[69].lr = {0, &lr, f32};
  groups[69].beta1 = {0, &beta1, f64};
  groups[69].beta2 = {0, &beta2, f32};
  for (int run = 0; run < 4; ++run) {
    const int64_t skew = run % 2;
    std::vector<Tensor> tensors;
    int k = 0;
    for (const Types& types : tuples) {
      // Two kernels: the usual one, and that of all roundings, which fp32 tensors share.
      const bool rare = types.rounding == kahan || types.rounding == stochastic;
      if (types.param != f32 && rare == (run < 2)) continue;
      for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{1030}, cuda::adam_chunk_size() + 13}) {
        tensors.push_back(make(types, n, skew, k % 3 == 1 ? 1 - skew : skew, k % 5 == 0 ? 69 : k % 4, k % 7 != 3));
        ++k;
      }
    }
    check_step(tensors, groups, &scale, &dirty, &norm);
    check_step(tensors, groups, &scale, &clean, &norm);
    check_step(tensors, groups, nullptr, nullptr, nullptr);
  }
  for (const int64_t skew : {0, 1}) {
    for (const DType state : {bf16, f32, f16}) check_stochastic_bits(state, skew);
  }
  for (const int64_t skew : {0, 1}) {
    check_norm_and_scale({f32, bf16, f16}, skew, &scale, false);
    check_norm_and_scale({f32, f64}, skew, nullptr, false);
    check_norm_and_scale({bf16, f32}, skew, &scale, true);
  }
  printf("%d checks, %d failures\n", checks, failures);
  return failures != 0;
}
