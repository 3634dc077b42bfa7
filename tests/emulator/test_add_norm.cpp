// The norm kernels on sums, emulated, against a double loop. Exits 1 with a line for each failure.
#include <cstdio>
#include <string>
#include <vector>

#include "arrays.h"
#include "norm.h"

namespace {

int failures = 0, checks = 0;

struct Case {
  bool rms;
  int64_t rows, hidden;
  DType x, residual, sum, y, param;
  double p = 0;      // share that dropout drops
  bool dsum = true;  // the sum has a gradient from elsewhere
  int64_t skew = 0;  // elements by which all but the parameters are misaligned
  int64_t pad = 0;   // elements between rows of the inputs
  bool affine = true;
  bool wants_residual = true;
  bool wants_input = true;
  int device = 0;  // of kDevices
  bool post_norm = false;
};

// With less shared memory, the backward kernel lays rows over a block in another way, and forward stages none.
constexpr emulator::Device kDevices[] = {{0, 2, 227 << 10}, {1, 2, 100 << 10}, {2, 2, 60 << 10}, {3, 1, 4 << 10}};

std::string describe(const Case& c) {
  static const char* names[] = {"f32", "f16", "bf16", "f64"};
  const auto name = [&](DType dtype) { return std::string(names[int(dtype)]); };
  return std::string(c.rms ? "rms " : "layer ") + std::to_string(c.rows) + "x" + std::to_string(c.hidden) + " " +
         name(c.x) + "+" + name(c.residual) + "=" + name(c.sum) + "->" + name(c.y) + " w " + name(c.param) + " p " +
         std::to_string(c.p) + " skew " + std::to_string(c.skew) + " device " + std::to_string(c.device) +
         (c.post_norm ? " post-norm" : "");
}

void expect(const Case& c, const char* what, const Array& out, int64_t i, double truth, double condition) {
  ++checks;
  const double acc = c.x == DType::f64 ? unit_roundoff(DType::f64) : unit_roundoff(DType::f32);
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

// What the element is multiplied with, from the generator's definition.
double factor_of(const fusedops::Dropout& d, int64_t row, int64_t col) {
  if (!d.seed) return 1;
  double factor[4];
  fusedops::dropout_factors(d, row, col / 4 * 4, factor);
  return factor[col % 4];
}

void run(const Case& c) {
  emulator::device = kDevices[c.device];
  const int64_t n = c.hidden, stride = n + c.pad, strided = (c.rows - 1) * stride + n;
  const DType stats = c.x == DType::f64 ? DType::f64 : DType::f32;
  Array x(c.x, strided, c.skew), residual(c.residual, strided, c.skew), dy(c.y, strided, c.skew);
  Array dsum(c.sum, strided, c.skew), w(c.param, n), b(c.param, n);
  Array sum(c.sum, c.rows * n, c.skew), y(c.y, c.rows * n, c.skew), mean(stats, c.rows), rstd(stats, c.rows);
  Array again(c.sum, c.rows * n, c.skew), alone(c.sum, c.rows * n, c.skew);
  Array dresidual(c.residual, c.rows * n, c.skew), dinput(c.x, c.rows * n, c.skew), dw(c.param, n), db(c.param, n);
  for (Array* a : {&x, &residual, &dy, &dsum}) a->fill(strided);
  for (Array* a : {&w, &b}) a->fill(n);
  const auto seed = std::make_unique<int64_t[]>(2);
  seed[0] = 0x1234567890abcdef, seed[1] = 0x13579bdf2468ace;
  const auto dropout = fusedops::make_dropout(c.p > 0 ? seed.get() : nullptr, c.p);

  fusedops::NormFwd fwd{};
  fwd.rms = c.rms;
  fwd.rows = c.rows;
  fwd.hidden = n;
  fwd.x = x.data();
  fwd.x_stride = stride;
  fwd.x_dtype = c.x;
  fwd.weight = c.affine ? w.data() : nullptr;
  fwd.weight_dtype = c.param;
  fwd.bias = c.affine && !c.rms ? b.data() : nullptr;
  fwd.bias_dtype = c.param;
  fwd.eps = 1e-5;
  fwd.weight_offset = c.rms && c.affine ? 1 : 0;
  fwd.y = y.data();
  fwd.y_dtype = c.y;
  fwd.mean = c.rms ? nullptr : mean.data();
  fwd.rstd = rstd.data();
  fwd.residual = residual.data();
  fwd.residual_stride = stride;
  fwd.residual_dtype = c.residual;
  fwd.dropout = dropout;
  fwd.sum = sum.data();
  fwd.sum_dtype = c.sum;
  fwd.residual_out = c.post_norm ? again.data() : nullptr;
  expect_launch(c, fusedops::cuda::norm_fwd(fwd, nullptr));
  if (c.post_norm) {  // as without a gradient, when no one wants the sum
    auto last = fwd;
    last.sum = last.residual_out = alone.data();
    expect_launch(c, fusedops::cuda::norm_fwd(last, nullptr));
  }

  fusedops::NormBwd bwd{};
  bwd.rms = c.rms;
  bwd.rows = c.rows;
  bwd.hidden = n;
  bwd.x = sum.data();
  bwd.x_stride = n;
  bwd.x_dtype = c.sum;
  bwd.dy = dy.data();
  bwd.dy_stride = stride;
  bwd.dy_dtype = c.y;
  bwd.weight = fwd.weight;
  bwd.weight_dtype = c.param;
  bwd.weight_offset = fwd.weight_offset;
  bwd.mean = fwd.mean;
  bwd.rstd = rstd.data();
  bwd.dx = c.wants_residual ? dresidual.data() : nullptr;
  bwd.dx_dtype = c.residual;
  bwd.dweight = c.affine ? dw.data() : nullptr;
  bwd.dbias = fwd.bias ? db.data() : nullptr;
  bwd.dbias_dtype = c.param;
  bwd.add = true;
  bwd.dsum = c.dsum ? dsum.data() : nullptr;
  bwd.dsum_stride = stride;
  bwd.post_norm = c.post_norm && c.dsum;
  bwd.dinput = c.wants_input ? dinput.data() : nullptr;
  bwd.dinput_dtype = c.x;
  bwd.dropout = dropout;
  std::vector<unsigned char> workspace(fusedops::cuda::norm_bwd_workspace(bwd), 0xff);
  bwd.workspace = workspace.data();
  expect_launch(c, fusedops::cuda::norm_bwd(bwd, nullptr));

  std::vector<double> dw_truth(n), db_truth(n), dw_condition(n), db_condition(n);
  Array rounded(c.sum, 1);
  for (int64_t r = 0; r < c.rows; ++r) {
    double m = 0, var = 0, sum_g = 0, sum_gx = 0, abs_g = 0, abs_gx = 0, largest = 0;
    const auto at = [&](int64_t i) { return sum.get(r * n + i); };
    const auto elsewhere_at = [&](int64_t i) { return c.dsum ? dsum.get(r * stride + i) : 0; };
    const auto dy_at = [&](int64_t i) { return dy.get(r * stride + i) + (c.post_norm ? elsewhere_at(i) : 0); };
    for (int64_t i = 0; i < n; ++i) {
      const double kept = x.get(r * stride + i) * factor_of(dropout, r, i), rest = residual.get(r * stride + i);
      rounded.set(0, c.x == DType::f64 ? kept + rest : float(kept) + float(rest));
      expect(c, "sum", sum, r * n + i, kept + rest, std::abs(kept) + std::abs(rest));
      failures += c.p == 0 && rounded.get(0) != at(i);
      m += c.rms ? 0 : at(i) / n;
      largest = std::max(largest, std::abs(at(i)));
    }
    for (int64_t i = 0; i < n; ++i) var += (at(i) - m) * (at(i) - m) / n;
    const double s = 1 / std::sqrt(var + 1e-5), amplify = 1 + largest * s;
    const auto weight = [&](int64_t i) { return c.affine ? w.get(i) + fwd.weight_offset : 1.0; };
    for (int64_t i = 0; i < n; ++i) {
      const double g = dy_at(i) * weight(i), xhat = (at(i) - m) * s;
      sum_g += c.rms ? 0 : g / n, sum_gx += g * xhat / n, abs_g += std::abs(g) / n, abs_gx += std::abs(g * xhat) / n;
    }
    for (int64_t i = 0; i < n; ++i) {
      const double d = dy_at(i), xhat = (at(i) - m) * s, g = d * weight(i);
      const double out = xhat * weight(i) + (fwd.bias ? b.get(i) : 0), factor = factor_of(dropout, r, i);
      const double elsewhere = c.post_norm ? 0 : elsewhere_at(i);
      const double both = s * (g - sum_g - xhat * sum_gx) + elsewhere;
      const double condition = s * (std::abs(g) + abs_g + std::abs(xhat) * abs_gx) * amplify + std::abs(elsewhere);
      const double terms = std::abs(weight(i)) * largest * s + std::abs(out);
      expect(c, "y", y, r * n + i, out, terms);
      if (c.post_norm) expect(c, "residual_out", again, r * n + i, out, terms);
      if (c.post_norm) expect(c, "residual_out, no sum kept", alone, r * n + i, out, terms);
      if (c.wants_residual) expect(c, "dresidual", dresidual, r * n + i, both, condition);
      if (c.wants_input) expect(c, "dinput", dinput, r * n + i, both * factor, condition * factor);
      dw_truth[i] += d * xhat, dw_condition[i] += std::abs(d) * (std::abs(xhat) + amplify);
      db_truth[i] += d, db_condition[i] += std::abs(d);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (bwd.dweight) expect(c, "dweight", dw, i, dw_truth[i], dw_condition[i]);
    if (bwd.dbias) expect(c, "dbias", db, i, db_truth[i], db_condition[i]);
  }
}

}  // namespace

int main() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16, f64 = DType::f64;
  struct Mix {
    DType x, residual, sum, y, param;
  };
  // The mixes that have kernels of their own, then others.
  const Mix own[] = {{f32, f32, f32, f32, f32},
                     {bf16, bf16, bf16, bf16, bf16},
                     {f16, f16, f16, f16, f16},
                     {bf16, f32, f32, bf16, f32},
                     {f16, f32, f32, f16, f32}};
  const Mix others[] = {{bf16, bf16, f32, f32, f32},
                        {f32, bf16, f16, bf16, f16},
                        {f16, f32, bf16, bf16, f32},
                        {bf16, f32, bf16, f16, bf16},
                        {f64, f64, f64, f64, f64}};
  for (const bool rms : {false, true}) {
    for (const auto& m : own) {
      const auto with = [&](int64_t rows, int64_t hidden, double p) {
        return Case{rms, rows, hidden, m.x, m.residual, m.sum, m.y, m.param, p};
      };
      const int64_t vec = m.sum == f32 ? 4 : 8;
      Case c = with(5, 32 * vec, 0.5);
      run(c);
      c.hidden -= vec, c.post_norm = true;
      run(c);
      c = with(6, 40, 0.25);
      c.pad = 8;
      c.dsum = false;
      run(c);
      c.skew = 1, c.dsum = true;  // wide kernels
      run(c);
      c.post_norm = true;
      run(c);
      for (const int64_t held : {2, 3, 4}) {  // vectors a thread; no parameters: their finish is slow here
        c = with(2, 32 * held * vec - vec, 0.5);
        c.affine = false;
        run(c);
      }
      if (m.sum == f32) c = with(1, 2049 * vec, 0.5), c.affine = false, run(c);  // six
      c = with(2, 2050, 0.5);
      c.affine = false, c.device = 3;  // rows of forward are read again, backward has no room for a ring
      run(c);
      c.post_norm = true;
      run(c);
      for (const int device : {1, 2}) {
        c = with(2, 3072, 0.5);
        c.affine = false, c.device = device;
        run(c);
      }
    }
    for (const auto& m : others) {
      Case c{rms, 5, 96, m.x, m.residual, m.sum, m.y, m.param, 0.5};
      run(c);
      c.post_norm = true;
      run(c);
      run({rms, 3, 41, m.x, m.residual, m.sum, m.y, m.param, 0.0, true, /*skew=*/1, /*pad=*/3});
    }
    run({rms, 3, 64, bf16, f32, f32, bf16, f32, 0.5, true, 0, 0, true, /*wants_residual=*/false});
    run({rms, 3, 64, bf16, f32, f32, bf16, f32, 0.5, true, 0, 0, true, true, /*wants_input=*/false});
    run({rms, 3, 64, f32, f32, f32, f32, f32, 1.0});
    run({rms, 3, 1, f32, f32, f32, f32, f32, 0.5});
  }
  printf("%d checks, %d failures, %ld launches\n", checks, failures, emulator::launches);
  return failures ? 1 : 0;
}
