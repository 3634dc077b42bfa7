// The emulator itself: what it computes, and that it reports what CUDA leaves undefined. With the name of a planted
// fault as its argument it runs that one, which has to end the process.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

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
  int beyond = 0;
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

void write_a_half_kernel(Params p) {
  if (threadIdx.x < 16) p.out[threadIdx.x] = 1;
}

void accumulate_kernel(Params p) { p.out[threadIdx.x] += 1; }

void read_dynamic_kernel(Params p) { p.out[threadIdx.x] = fusedops::cuda::dynamic_smem()[0] == 0xff ? NAN : 1; }

// ---- planted faults: what they index with is not known when compiling

__global__ void half_barrier_kernel(Params p) {
  if (threadIdx.x < 16 && blockIdx.x == 1) __syncthreads();
}

__global__ void two_barriers_kernel(Params p) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void short_group_kernel(Params p) {
  if (threadIdx.x >= 8) fusedops::cuda::sync_group(3, 32);
}

__global__ void dynamic_overrun_kernel(Params p) {
  reinterpret_cast<float*>(fusedops::cuda::dynamic_smem())[threadIdx.x + p.beyond] = 1;
}

template <class T>
__global__ void static_overrun_kernel(Params p) {
  __shared__ T sums[32];
  T* at = sums;
  p.out[threadIdx.x] = at[threadIdx.x + p.beyond];
}

template <class T>
__device__ __forceinline__ T shared_helper(int at) {
  __shared__ T sums[32];
  T* p = sums;
  return p[at];
}
__global__ void helper_overrun_kernel(Params p) { p.out[threadIdx.x] = shared_helper<double>(threadIdx.x + p.beyond); }

__global__ void local_overrun_kernel(Params p) {
  float mine[4] = {};
  __syncthreads();
  float* at = mine;
  p.out[threadIdx.x] = at[3 + p.beyond];
}

__global__ void output_overrun_kernel(Params p) { p.out[threadIdx.x + p.beyond] = 1; }

__global__ void misaligned_kernel(Params p) { *reinterpret_cast<float4*>(p.out + p.beyond) = float4{}; }

__global__ void misaligned_copy_kernel(Params p) {
  fusedops::cuda::start_copy<16>(fusedops::cuda::dynamic_smem(), p.out + p.beyond);
}

template <class Kernel>
cudaError_t launch(Kernel kernel, unsigned threads, const Params& params, size_t smem = 0, unsigned blocks = 1) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  return cudaLaunchKernelEx(&config, kernel, params);
}

struct Plant {
  const char* name;
  void (*kernel)(Params);
};
constexpr Plant kPlants[] = {
    {"half_barrier", half_barrier_kernel},
    {"two_barriers", two_barriers_kernel},
    {"short_group", short_group_kernel},
    {"dynamic_overrun", dynamic_overrun_kernel},
    {"static_overrun", static_overrun_kernel<float>},
    {"helper_overrun", helper_overrun_kernel},
    {"local_overrun", local_overrun_kernel},
    {"output_overrun", output_overrun_kernel},
    {"misaligned", misaligned_kernel},
    {"misaligned_copy", misaligned_copy_kernel},
};

int run_plant(const char* name) {
  const std::unique_ptr<float[]> out(new float[32]);
  for (const Plant& plant : kPlants) {
    if (strcmp(plant.name, name) == 0) launch(plant.kernel, 32, {out.get(), 1}, 32 * sizeof(float), /*blocks=*/2);
  }
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
  const auto poison = [&] { memset(out, 0xff, sizeof out); };
  poison();
  launch(write_a_half_kernel, 32, {out});
  expect(out[15] == 1 && std::isnan(out[16]), "what a kernel leaves out stays NaN");
  poison();
  launch(accumulate_kernel, 32, {out});
  expect(std::isnan(out[0]), "an output that is read before it is written is NaN");
  launch(read_dynamic_kernel, 32, {out}, 16);
  expect(std::isnan(out[0]), "shared memory starts as NaN");
}

void check_what_it_refuses() {
  float out[32] = {};
  std::string said;
  try {
    launch(half_barrier_kernel, 32, {out}, 0, /*blocks=*/2);
  } catch (const emulator::Deadlock& error) {
    said = error.what();
  }
  expect(said.find("half_barrier_kernel") != said.npos && said.find("block 1,0") != said.npos &&
             said.find("16 wait at __syncthreads at test_emulator.cpp:") != said.npos,
         "a barrier that not all threads reach is reported with kernel, block and barrier");
  expect(launch(half_barrier_kernel, 2048, {out}) != cudaSuccess, "2,048 threads a block are refused");
  expect(launch(half_barrier_kernel, 32, {out}, 1 << 20) != cudaSuccess, "1 MiB of shared memory is refused");
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return run_plant(arguments[1]);
  check_what_it_computes();
  check_what_nobody_wrote();
  check_what_it_refuses();
  return failures ? 1 : 0;
}
