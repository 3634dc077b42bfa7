// See planted.h. A .cu file, since in these alone static shared memory starts as NaN.
#include "planted.h"

#include <cstring>

#include "cuda/ptx.cuh"

namespace {

__global__ void half_barrier_kernel(PlantParams p) {
  if (threadIdx.x < 16 && blockIdx.x == 1) __syncthreads();
}

__global__ void two_barriers_kernel(PlantParams p) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void short_group_kernel(PlantParams p) {
  if (threadIdx.x >= 8) fusedops::cuda::sync_group(3, 32);
}

__global__ void dynamic_overrun_kernel(PlantParams p) {
  reinterpret_cast<float*>(fusedops::cuda::dynamic_smem())[threadIdx.x + p.beyond] = 1;
}

template <class T>
__global__ void static_overrun_kernel(PlantParams p) {
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
__global__ void helper_overrun_kernel(PlantParams p) {
  p.out[threadIdx.x] = shared_helper<double>(threadIdx.x + p.beyond);
}

__global__ void local_overrun_kernel(PlantParams p) {
  float mine[4] = {};
  __syncthreads();
  float* at = mine;
  p.out[threadIdx.x] = at[3 + p.beyond];
}

__global__ void output_overrun_kernel(PlantParams p) { p.out[threadIdx.x + p.beyond] = 1; }

__global__ void misaligned_kernel(PlantParams p) { *reinterpret_cast<float4*>(p.out + p.beyond) = float4{}; }

__global__ void misaligned_copy_kernel(PlantParams p) {
  fusedops::cuda::start_copy<16>(fusedops::cuda::dynamic_smem(), p.out + p.beyond);
}

__global__ void unwritten_shared_kernel(PlantParams p) {
  __shared__ float sums[32];
  if (threadIdx.x < 16) sums[threadIdx.x] = 1;
  __syncthreads();
  p.out[threadIdx.x] = sums[threadIdx.x];
}

__global__ void unwritten_dynamic_kernel(PlantParams p) {
  p.out[threadIdx.x] = reinterpret_cast<float*>(fusedops::cuda::dynamic_smem())[threadIdx.x];
}

__global__ void half_output_kernel(PlantParams p) {
  if (threadIdx.x < 16) p.out[threadIdx.x] = 1;
}

__global__ void accumulate_kernel(PlantParams p) { p.out[threadIdx.x] += 1; }

struct Plant {
  const char* name;
  PlantedKernel kernel;
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
    {"unwritten_shared", unwritten_shared_kernel},
    {"unwritten_dynamic", unwritten_dynamic_kernel},
    {"half_output", half_output_kernel},
    {"accumulate", accumulate_kernel},
};

}  // namespace

PlantedKernel planted_kernel(const char* name) {
  for (const Plant& plant : kPlants) {
    if (strcmp(plant.name, name) == 0) return plant.kernel;
  }
  return nullptr;
}
