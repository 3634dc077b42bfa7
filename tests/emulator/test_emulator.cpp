// The emulator itself: what it computes, and that it reports what CUDA leaves undefined. With the name of a planted
// fault as its argument it runs that one, which has to end the process.
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "cuda/reduce.cuh"
#include "planted.h"

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
  if (ok) return;
  printf("FAIL %s\n", what);
  ++failures;
}

using Params = PlantParams;

void shuffle_down_kernel(Params p) { p.out[threadIdx.x] = __shfl_down_sync(0xffffffffu, float(threadIdx.x), 8); }

void each_sum_kernel(Params p) {
  float v[4] = {1, 2, 3, float(threadIdx.x)};
  __shared__ fusedops::cuda::Exchange<float, 4> exchange;
  fusedops::cuda::row_sum_each(v, exchange, /*first=*/1, /*warps=*/2, /*barrier=*/1);
  if (threadIdx.x == 40) {
    for (int k = 0; k < 4; ++k) p.out[k] = v[k];
  }
}

void late_copy_kernel(Params p) {
  auto* shared = reinterpret_cast<float*>(fusedops::cuda::dynamic_smem());
  fusedops::cuda::start_copy<4>(shared, p.out);
  fusedops::cuda::commit_copies();
  const float before = *shared;
  fusedops::cuda::wait_copies<0>();
  p.out[1] = before;
  p.out[2] = *shared;
}

template <class Kernel>
cudaError_t launch(Kernel kernel, unsigned threads, const Params& params, size_t smem = 0, unsigned blocks = 1) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  return cudaLaunchKernelEx(&config, kernel, params);
}

cudaError_t launch_planted(const char* name, float* out, unsigned blocks = 1) {
  return launch(planted_kernel(name), 32, {out, /*beyond=*/1}, 32 * sizeof(float), blocks);
}

int run_plant(const char* name) {
  const std::unique_ptr<float[]> out(new float[32]);
  launch_planted(name, out.get(), /*blocks=*/2);
  printf("%s was not caught\n", name);
  return 0;
}

void check_what_it_computes() {
  float out[32] = {};
  launch(shuffle_down_kernel, 32, {out});
  expect(out[0] == 8 && out[23] == 31, "shfl_down reads the lane above");
  expect(out[24] == 24 && out[31] == 31, "shfl_down past lane 31 returns the thread's own value");

  launch(each_sum_kernel, 64, {out});
  expect(out[0] == 64 && out[1] == 128 && out[2] == 192 && out[3] == 2016, "row_sum_each adds each sum up");

  float copied[3] = {7, 0, 0};
  launch(late_copy_kernel, 1, {copied}, 16);
  expect(copied[1] != copied[1] && copied[2] == 7, "a copy lands when it is waited for, not before");
}

void check_what_nobody_wrote() {
  float out[32];
  for (const char* name : {"half_output", "accumulate", "unwritten_shared", "unwritten_dynamic"}) {
    for (int again = 0; again < 2; ++again) {
      memset(out, 0xff, sizeof out);
      launch_planted(name, out);
      expect(std::isnan(out[31]), name);
    }
  }
}

void check_what_it_refuses() {
  float out[32] = {};
  std::string said;
  try {
    launch_planted("half_barrier", out, /*blocks=*/2);
  } catch (const emulator::Deadlock& error) {
    said = error.what();
  }
  expect(said.find("half_barrier_kernel") != said.npos && said.find("block 1,0") != said.npos &&
             said.find("16 wait at __syncthreads at planted.cu:") != said.npos,
         "a barrier that not all threads reach is reported with kernel, block and barrier");
  expect(launch(shuffle_down_kernel, 2048, {out}) != cudaSuccess, "2,048 threads a block are refused");
  expect(launch(shuffle_down_kernel, 32, {out}, 1 << 20) != cudaSuccess, "1 MiB of shared memory is refused");
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return run_plant(arguments[1]);
  check_what_it_computes();
  check_what_nobody_wrote();
  check_what_it_refuses();
  return failures ? 1 : 0;
}
