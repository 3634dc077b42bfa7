// The emulator itself: what it computes, and that it reports what CUDA leaves undefined.
#include <cstdio>

#include "cuda/reduce.cuh"

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
  if (ok) return;
  printf("FAIL %s\n", what);
  ++failures;
}

struct Params {
  float* out;
};

void shuffle_down_kernel(Params p) { p.out[threadIdx.x] = __shfl_down_sync(0xffffffffu, float(threadIdx.x), 8); }

void each_sum_kernel(Params p) {
  float v[4] = {1, 2, 3, float(threadIdx.x)};
  __shared__ float buffer[2][4];
  fusedops::cuda::row_sum_each(v, buffer, 2, 1);
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

void half_barrier_kernel(Params) {
  if (threadIdx.x < 16) __syncthreads();
}

template <class Kernel>
cudaError_t launch(Kernel kernel, unsigned threads, const Params& params, size_t smem = 0) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

int main() {
  float out[32] = {};
  launch(shuffle_down_kernel, 32, {out});
  expect(out[0] == 8 && out[23] == 31, "shfl_down reads the lane above");
  expect(out[24] == 24 && out[31] == 31, "shfl_down past lane 31 returns the thread's own value");

  launch(each_sum_kernel, 64, {out});
  expect(out[0] == 64 && out[1] == 128 && out[2] == 192 && out[3] == 2016, "row_sum_each adds each sum up");

  float copied[3] = {7, 0, 0};
  launch(late_copy_kernel, 1, {copied}, 16);
  expect(copied[1] != copied[1] && copied[2] == 7, "a copy lands when it is waited for, not before");

  bool caught = false;
  try {
    launch(half_barrier_kernel, 32, {out});
  } catch (const emulator::Deadlock& error) {
    caught = true;
  }
  expect(caught, "a barrier that not all threads reach is reported");
  expect(launch(half_barrier_kernel, 2048, {out}) != cudaSuccess, "2,048 threads a block are refused");
  expect(launch(half_barrier_kernel, 32, {out}, 1 << 20) != cudaSuccess, "1 MiB of shared memory is refused");
  return failures ? 1 : 0;
}
