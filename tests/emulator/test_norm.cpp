// The norm kernels and their launchers, emulated, against a double loop. Exits 1 with a line for each failure.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "arrays.h"
#include "norm.h"

using fusedops::DType;

namespace {

int failures = 0, checks = 0;

struct Case {
  bool rms;
  int64_t rows, hidden;
  DType x, y, weight, bias;
  int64_t skew = 0;    // elements by which x, dy, y and dx are misaligned
  int64_t pad = 0;     // elements between rows of x and dy
  bool affine = true;  // weight and bias are given
  double offset = 0;
  double shift = 0;  // mean of x
  int device = 0;    // of kDevices
  bool with_bias = true;
  bool sums = true;    // dweight and dbias are wanted
  bool alike = false;  // rows of x are all the same, and so are those of dy: so are rounding errors
};

// With less shared memory, the backward kernel lays rows over a block in another way, and forward stages none. With one
// multiprocessor few groups of threads share the rows.
constexpr emulator::Device kDevices[] = {
    {0, 2, 227 << 10}, {1, 2, 68 << 10}, {2, 2, 44 << 10}, {3, 1, 4 << 10}, {4, 1, 227 << 10}};

std::string describe(const Case& c) {
  static const char* names[] = {"f32", "f16", "bf16", "f64"};
  return std::string(c.rms ? "rms " : "layer ") + std::to_string(c.rows) + "x" + std::to_string(c.hidden) + " " +
         names[int(c.x)] + "->" + names[int(c.y)] + " w " + names[int(c.weight)] + " b " + names[int(c.bias)] +
         " skew " + std::to_string(c.skew) + " pad " + std::to_string(c.pad) + " device " + std::to_string(c.device);
}

// `terms`: length of the sum behind it.
void expect(const Case& c, const char* what, const Array& out, int64_t i, double truth, double condition,
            double terms = 1 << 16) {
  ++checks;
  const double acc = c.x == DType::f64 ? unit_roundoff(DType::f64) : unit_roundoff(DType::f32);
  const double bound = 2 * unit_roundoff(out.dtype) * std::abs(truth) +
                       4 * std::sqrt(std::log2(terms)) * acc * condition + (out.dtype == DType::f16 ? 6e-8 : 0);
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
  emulator::device = kDevices[c.device];
  const int64_t n = c.hidden, stride = n + c.pad, elements = c.rows > 0 ? (c.rows - 1) * stride + n : 0;
  const DType stats = c.x == DType::f64 ? DType::f64 : DType::f32;
  Array x(c.x, elements, c.skew), dy(c.y, elements, c.skew), w(c.weight, n), b(c.bias, n);
  Array y(c.y, c.rows * n, c.skew), dx(c.x, c.rows * n, c.skew), dw(c.weight, n), db(c.bias, n);
  Array mean(stats, c.rows), rstd(stats, c.rows);
  x.fill(elements);
  for (int64_t i = 0; i < elements && c.shift != 0; ++i) x.set(i, x.get(i) + c.shift);
  dy.fill(elements);
  for (int64_t i = n; i < elements && c.alike; ++i) {
    x.set(i, x.get(i - stride));
    dy.set(i, dy.get(i - stride));
  }
  w.fill(n);
  b.fill(n);

  fusedops::NormFwd fwd{};
  fwd.rms = c.rms;
  fwd.rows = c.rows;
  fwd.hidden = n;
  fwd.x = x.data();
  fwd.x_stride = stride;
  fwd.x_dtype = c.x;
  fwd.weight = c.affine ? w.data() : nullptr;
  fwd.weight_dtype = c.weight;
  fwd.bias = c.affine && c.with_bias && !c.rms ? b.data() : nullptr;
  fwd.bias_dtype = c.bias;
  fwd.eps = 1e-5;
  fwd.weight_offset = c.offset;
  fwd.y = y.data();
  fwd.y_dtype = c.y;
  fwd.mean = c.rms ? nullptr : mean.data();
  fwd.rstd = rstd.data();
  expect_launch(c, fusedops::cuda::norm_fwd(fwd, nullptr));

  fusedops::NormBwd bwd{};
  bwd.rms = c.rms;
  bwd.rows = c.rows;
  bwd.hidden = n;
  bwd.x = x.data();
  bwd.x_stride = stride;
  bwd.x_dtype = c.x;
  bwd.dy = dy.data();
  bwd.dy_stride = stride;
  bwd.dy_dtype = c.y;
  bwd.weight = fwd.weight;
  bwd.weight_dtype = c.weight;
  bwd.weight_offset = c.offset;
  bwd.mean = fwd.mean;
  bwd.rstd = rstd.data();
  bwd.dx = dx.data();
  bwd.dweight = c.affine && c.sums ? dw.data() : nullptr;
  bwd.dbias = fwd.bias && c.sums ? db.data() : nullptr;
  bwd.dbias_dtype = c.bias;
  const int64_t bytes = fusedops::cuda::norm_bwd_workspace(bwd);
  std::unique_ptr<unsigned char[]> workspace(new unsigned char[bytes]);
  memset(workspace.get(), 0xff, bytes);
  bwd.workspace = bytes ? workspace.get() : nullptr;
  expect_launch(c, fusedops::cuda::norm_bwd(bwd, nullptr));

  std::vector<double> dw_truth(n), dw_condition(n), db_truth(n), db_condition(n);
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto at = [&](int64_t i) { return x.get(r * stride + i); };
    double m = 0, var = 0, largest = 0, sum_g = 0, sum_gx = 0, abs_g = 0, abs_gx = 0;
    for (int64_t i = 0; i < n; ++i) m += c.rms ? 0 : at(i) / n;
    for (int64_t i = 0; i < n; ++i) var += (at(i) - m) * (at(i) - m) / n, largest = std::max(largest, std::abs(at(i)));
    const double s = 1 / std::sqrt(var + 1e-5), amplify = 1 + largest * s;
    const auto weight = [&](int64_t i) { return c.affine ? w.get(i) + c.offset : 1.0; };
    for (int64_t i = 0; i < n; ++i) {
      const double g = dy.get(r * stride + i) * weight(i), xhat = (at(i) - m) * s;
      sum_g += c.rms ? 0 : g / n, sum_gx += g * xhat / n, abs_g += std::abs(g) / n, abs_gx += std::abs(g * xhat) / n;
    }
    for (int64_t i = 0; i < n; ++i) {
      const double d = dy.get(r * stride + i), xhat = (at(i) - m) * s, g = d * weight(i);
      const double out = xhat * weight(i) + (fwd.bias ? b.get(i) : 0);
      expect(c, "y", y, r * n + i, out, std::abs(weight(i)) * largest * s + std::abs(out));
      expect(c, "dx", dx, r * n + i, s * (g - sum_g - xhat * sum_gx),
             s * (std::abs(g) + abs_g + std::abs(xhat) * abs_gx) * amplify);
      dw_truth[i] += d * xhat, dw_condition[i] += std::abs(d) * (std::abs(xhat) + (c.rms && c.alike ? 0 : amplify));
      db_truth[i] += d, db_condition[i] += std::abs(d);
    }
    if (fwd.mean) expect(c, "mean", mean, r, m, largest);
    expect(c, "rstd", rstd, r, s, s * amplify);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (bwd.dweight) expect(c, "dweight", dw, i, dw_truth[i], dw_condition[i], c.alike ? c.rows : 1 << 16);
    if (bwd.dbias) expect(c, "dbias", db, i, db_truth[i], db_condition[i], c.alike ? c.rows : 1 << 16);
  }
}

// Squares that add up to inf make rstd 0 and y the bias, as in PyTorch; never NaN.
void run_beyond_squares(bool rms, int64_t hidden, int device) {
  const DType f32 = DType::f32;
  const Case c{rms, 3, hidden, f32, f32, f32, f32, 0, 0, true, 0, 1e30, device};
  emulator::device = kDevices[device];
  Array x(f32, c.rows * hidden), b(f32, hidden), y(f32, c.rows * hidden), mean(f32, c.rows), rstd(f32, c.rows);
  x.fill(c.rows * hidden);
  for (int64_t i = 0; i < c.rows * hidden; ++i) x.set(i, 1e30 * (1 + x.get(i)));
  b.fill(hidden);
  fusedops::NormFwd fwd{};
  fwd.rms = rms;
  fwd.rows = c.rows;
  fwd.hidden = fwd.x_stride = hidden;
  fwd.x = x.data();
  fwd.x_dtype = fwd.weight_dtype = fwd.bias_dtype = fwd.y_dtype = f32;
  fwd.bias = rms ? nullptr : b.data();
  fwd.eps = 1e-5;
  fwd.y = y.data();
  fwd.mean = rms ? nullptr : mean.data();
  fwd.rstd = rstd.data();
  expect_launch(c, fusedops::cuda::norm_fwd(fwd, nullptr));
  for (int64_t i = 0; i < c.rows * hidden; ++i) expect(c, "y", y, i, rms ? 0 : b.get(i % hidden), 0);
}

}  // namespace

int main() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16, f64 = DType::f64;
  const std::pair<DType, DType> pairs[] = {{f32, f32},  {f32, f16},  {f32, bf16}, {f16, f32},   {f16, f16},
                                           {f16, bf16}, {bf16, f32}, {bf16, f16}, {bf16, bf16}, {f64, f64}};
  for (const bool rms : {false, true}) {
    for (const auto& [x, y] : pairs) {  // every kernel there is
      const DType param = x == f64 ? f64 : y, bias = x == f64 ? f64 : f32;
      const int64_t vec = 16 / std::max(size_of(x), size_of(y));
      const auto small = [&](int64_t rows, int64_t hidden, int64_t skew = 0, int device = 0) {
        run({rms, rows, hidden, x, y, param, skew ? bias : param, skew, 0, true, rms ? 0.5 : 0.0, 0, device});
      };
      const auto large = [&](int64_t rows, int64_t hidden, int device = 0) {  // its many threads would take long
        run({rms, rows, hidden, x, y, param, param, 0, 0, true, rms ? 0.5 : 0.0, 0, device, true, /*sums=*/false});
      };
      small(5, 32 * vec);
      for (const int held : {1, 2, 3, 4}) {  // vectors a thread
        large(5, 32 * held * vec);
        large(2, 32 * held * vec - vec);
      }
      large(2, 288 * vec);                 // three of each of several warps
      if (vec == 4) large(1, 2049 * vec);  // six
      for (const int hidden : {1, 41, 200})
        small(9, hidden, /*skew=*/1);  // shifted rows, of one vector a thread or more
      small(5, 16 * 32 + 3);           // of several warps
      large(2, 2050, /*device=*/3);    // read again
      for (const int device : {1, 2}) large(2, x == f32 && y == f32 ? 3072 : 4096, device);
    }
    for (const int64_t hidden : {1, 33, 257}) run({rms, 3, hidden, bf16, bf16, f32, bf16});
    run({rms, 7, 40, f32, f32, f32, f32, /*skew=*/1, /*pad=*/3});
    run({rms, 7, 40, f16, f32, f16, f16, /*skew=*/0, /*pad=*/8, /*affine=*/false});
    run({rms, 7000, 32, f32, f32, f32, f32, 0, 0, true, 0, 0, /*device=*/4, true, true, /*alike=*/true});
  }
  run({false, 3, 512, f32, f32, f32, f32, 0, 0, true, 0, /*shift=*/1e4});
  run({false, 37, 256, bf16, bf16, f32, f32});  // several tiles a group
  run({false, 3, 72, bf16, bf16, f32, f16});    // weight and bias of two dtypes
  run({false, 3, 72, bf16, bf16, bf16, f32});
  run({false, 3, 72, f32, f32, f16, bf16});
  run({false, 3, 72, bf16, bf16, f32, f32, 0, 0, true, 0, 0, 0, /*with_bias=*/false});
  run({true, 2, 1023, bf16, bf16, bf16, bf16});  // several warps a row
  for (int64_t skew = 0; skew < 8; ++skew) {
    run({false, 5, 300, bf16, bf16, f32, f32, skew, /*pad=*/skew % 3});
    run({false, 5, 300, f32, f16, f16, f16, skew, /*pad=*/1});
    run({true, 300, 9, bf16, bf16, bf16, bf16, skew});
  }
  run({true, 1, 16500, bf16, bf16, bf16, bf16});  // wide rows, staged
  for (const bool rms : {false, true}) {
    for (const int64_t hidden : {41, 256, 1000, 2050}) run_beyond_squares(rms, hidden, hidden == 2050 ? 3 : 0);
  }
  printf("%d checks, %d failures, %ld launches\n", checks, failures, emulator::launches);
  return failures ? 1 : 0;
}
