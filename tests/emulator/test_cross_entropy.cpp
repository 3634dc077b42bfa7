// The cross-entropy kernels and their launchers, emulated, against a double loop. Exits 1 with a line for each failure;
// with an argument it runs the one call that has to stop the kernel.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "arrays.h"
#include "cross_entropy.h"

using fusedops::DType;
using fusedops::Reduction;

namespace {

int failures = 0, checks = 0;

struct Case {
  DType x;
  int64_t rows, classes;
  Reduction reduction = Reduction::mean;
  int64_t skew = 0;  // elements by which x and dx are misaligned
  int64_t pad = 0;   // elements between rows of x
  bool weighted = false;
  double smoothing = 0, z_loss = 0, softcap = 0;
  bool in_place = false;
  double shift = 0;  // mean of x
};

std::string describe(const Case& c) {
  static const char* names[] = {"f32", "f16", "bf16", "f64"};
  return std::string(names[int(c.x)]) + " " + std::to_string(c.rows) + "x" + std::to_string(c.classes) + " reduction " +
         std::to_string(int(c.reduction)) + " skew " + std::to_string(c.skew) + " pad " + std::to_string(c.pad) +
         " smoothing " + std::to_string(c.smoothing) + " softcap " + std::to_string(c.softcap);
}

void expect(const Case& c, const char* what, const Array& out, int64_t i, double truth, double condition) {
  ++checks;
  // In fp64 the truth has as large an error as what it judges.
  const double acc = c.x == DType::f64 ? 2 * unit_roundoff(DType::f64) : unit_roundoff(DType::f32);
  const double bound =
      2 * unit_roundoff(out.dtype) * std::abs(truth) + 16 * acc * condition + (out.dtype == DType::f16 ? 6e-8 : 0);
  const double error = std::abs(out.get(i) - truth);
  if (error <= bound) return;
  if (++failures <= 20) {
    printf("FAIL %s: %s[%ld] is %g, expected %g, off by %.2g of the bound\n", describe(c).c_str(), what, long(i),
           out.get(i), truth, error / bound);
  }
}

void expect_launch(const Case& c, const char* error) {
  if (error) printf("FAIL %s: launch: %s\n", describe(c).c_str(), error), ++failures;
}

void run(const Case& c) {
  const int64_t n = c.classes, stride = n + c.pad, elements = (c.rows - 1) * stride + n;
  const DType acc = c.x == DType::f64 ? DType::f64 : DType::f32;
  const bool none = c.reduction == Reduction::none, mean = c.reduction == Reduction::mean;
  Array x(c.x, elements, c.skew), dx(c.x, c.rows * n, c.skew), w(acc, n), weights(acc, 1), dloss(acc, c.rows);
  Array stats(acc, 2 * c.rows), losses(acc, c.rows), loss(acc, 1), total(acc, 1);
  x.fill(elements);
  for (int64_t i = 0; i < elements; ++i) x.set(i, 3 * x.get(i) + c.shift);
  dloss.fill(c.rows);
  double all = n;
  if (c.weighted) {
    w.fill(n);
    all = 0;
    for (int64_t i = 0; i < n; ++i) w.set(i, std::abs(w.get(i)) + 0.5), all += w.get(i);
    weights.set(0, all);
  }
  std::vector<int64_t> target(c.rows);
  for (int64_t r = 0; r < c.rows; ++r) target[r] = r % 5 == 4 ? -100 : r * 7919 % n;
  std::vector<double> logits(elements);
  for (int64_t i = 0; i < elements; ++i) logits[i] = x.get(i);

  fusedops::CrossEntropyFwd fwd{};
  auto& call = fwd.c;
  call.rows = c.rows;
  call.classes = n;
  call.x = x.data();
  call.x_stride = stride;
  call.x_dtype = c.x;
  call.target = target.data();
  call.weight = c.weighted ? w.data() : nullptr;
  call.weights = c.weighted && c.smoothing != 0 ? weights.data() : nullptr;
  call.ignore_index = -100;
  call.reduction = c.reduction;
  call.smoothing = c.smoothing;
  call.z_loss = c.z_loss;
  call.softcap = c.softcap;
  fwd.stats = stats.data();
  fwd.losses = losses.data();
  fwd.loss = none ? nullptr : loss.data();
  fwd.total_weight = total.data();
  const int64_t bytes = fusedops::cuda::cross_entropy_workspace(c.rows, c.reduction);
  std::unique_ptr<unsigned char[]> workspace(new unsigned char[bytes]);
  memset(workspace.get(), 0xff, bytes);
  fwd.workspace = bytes ? workspace.get() : nullptr;
  expect_launch(c, fusedops::cuda::cross_entropy_fwd(fwd, nullptr));

  fusedops::CrossEntropyBwd bwd{};
  bwd.c = call;
  bwd.stats = stats.data();
  bwd.dloss = dloss.data();
  bwd.total_weight = total.data();
  bwd.dx = c.in_place ? x.data() : dx.data();
  bwd.dx_stride = c.in_place ? stride : n;
  expect_launch(c, fusedops::cuda::cross_entropy_bwd(bwd, nullptr));
  const Array& grad = c.in_place ? x : dx;

  const auto weight = [&](int64_t i) { return c.weighted ? w.get(i) : 1.0; };
  double sum = 0, condition = 0, counted = 0;
  for (int64_t r = 0; r < c.rows; ++r) counted += target[r] < 0 ? 0 : weight(target[r]);
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t t = target[r];
    if (t < 0) {
      expect(c, "ignored loss", losses, r, 0, 0);
      for (int64_t i = 0; i < n; ++i) expect(c, "ignored dx", grad, r * bwd.dx_stride + i, 0, 0);
      continue;
    }
    const auto z = [&](int64_t i) {
      const double v = logits[r * stride + i];
      return c.softcap != 0 ? c.softcap * std::tanh(v / c.softcap) : v;
    };
    double m = -INFINITY, s = 0, spread = 0, size = 0;
    for (int64_t i = 0; i < n; ++i) m = std::max(m, z(i));
    for (int64_t i = 0; i < n; ++i) s += std::exp(z(i) - m);
    const double lse = m + std::log(s);
    for (int64_t i = 0; i < n; ++i) {
      spread += weight(i) * (lse - z(i)) / n, size += weight(i) * (std::abs(lse) + std::abs(z(i)) + 1) / n;
    }
    const double own = (1 - c.smoothing) * weight(t), capped = c.softcap != 0 ? std::abs(m) : 0;
    const double truth = own * (lse - z(t)) + c.smoothing * spread + c.z_loss * lse * lse;
    const double of =
        own * (1 + lse - z(t) + capped) + c.smoothing * size + 2 * c.z_loss * std::abs(lse) * (1 + std::abs(lse));
    expect(c, "loss", losses, r, truth, of);
    expect(c, "largest", stats, 2 * r, m, capped);
    expect(c, "log of the sum", stats, 2 * r + 1, std::log(s), 1 + capped);
    sum += truth, condition += of;
    const double g = none ? dloss.get(r) : dloss.get(0) / (mean ? counted : 1);
    const double a = own + c.smoothing / n * all + 2 * c.z_loss * lse;
    for (int64_t i = 0; i < n; ++i) {
      const double p = std::exp(z(i) - lse), y = c.softcap != 0 ? z(i) / c.softcap : 0, one = i == t ? own : 0;
      const double even = c.smoothing / n * weight(i);
      const double b =
          std::abs(g) * (1 + y * y) *
          ((std::abs(a) + 2 * c.z_loss * std::abs(lse)) * (p * (1 + m - z(i) + lse - m + 2 * capped) + 1e-38) + even +
           one);
      expect(c, "dx", grad, r * bwd.dx_stride + i, g * (a * p - even - one) * (1 - y * y), b);
    }
  }
  if (mean) expect(c, "total weight", total, 0, counted, counted);
  if (!none) expect(c, "reduced loss", loss, 0, sum / (mean ? counted : 1), condition / (mean ? counted : 1));
}

}  // namespace

int main(int count, char**) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16, f64 = DType::f64;
  if (count > 1) {
    Array x(f32, 10), stats(f32, 2), losses(f32, 1);
    x.fill(10);
    const int64_t target = 10;
    fusedops::CrossEntropyFwd fwd{};
    fwd.c = {1, 10, x.data(), 10, f32, &target, nullptr, nullptr, -100, Reduction::none, 0, 0, 0};
    fwd.losses = losses.data();
    fusedops::cuda::cross_entropy_fwd(fwd, nullptr);
    return 0;
  }
  for (const DType x : {f32, f16, bf16, f64}) {
    const int64_t vec = 16 / size_of(x);
    const auto plain = [&](int64_t rows, int64_t classes, int64_t skew = 0, int64_t pad = 0) {
      run({x, rows, classes, Reduction::mean, skew, pad});
    };
    plain(6, 10);
    plain(3, 32 * vec);
    plain(2, 128 * vec);      // all of a warp's vectors at once
    plain(2, 128 * vec + 1);  // a second warp
    plain(6, 257, 1);         // rows that begin anywhere
    plain(6, 251, 1, 6);      // and end elsewhere in x than in dx
    plain(2, 1031, 3);
    run({x, 6, 257, Reduction::none, 1, 0, true, 0.1, 1e-3, 5});
    run({x, 6, 256, Reduction::sum, 0, 0, false, 0.1});
    run({x, 6, 200, Reduction::mean, 0, 0, true, 0, 0.1});
    run({x, 2, 128 * vec + 40, Reduction::none, 1, 0, false, 0.2, 0, 4});
    run({x, 6, 259, Reduction::none, 1, 3, false, 0, 0, 3, /*in_place=*/true});
    run({x, 6, 256, Reduction::mean, 0, 0, true, 0.3, 0, 0, /*in_place=*/true});
  }
  run({bf16, 2, 512 * 8 * 4 + 8 * 700 + 3, Reduction::mean, 5});  // several rounds of a whole block
  run({f32, 9000, 3});                                            // several blocks add up the losses
  run({f32, 3, 500, Reduction::none, 0, 0, false, 0, 0, 0, false, /*shift=*/1e4});
  run({f32, 1, 1});
  printf("%d checks, %d failures, %ld launches\n", checks, failures, emulator::launches);
  return failures ? 1 : 0;
}
