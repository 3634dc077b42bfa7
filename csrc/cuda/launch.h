// Device properties, and the one way in which kernels are launched and their errors seen.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

namespace fusedops::cuda {

// Bytes of shared memory that kernels which ask for more at launch may have of their own.
constexpr int kStaticSmem = 3 << 10;

// Blocks of a cluster at most: as many as any GPU that has clusters takes.
constexpr int kMostBlocks = 8;

struct Device {
  int major;         // compute capability
  int sms;           // multiprocessors
  int dynamic_smem;  // bytes of shared memory that a launch may ask for: a block's, but for kStaticSmem
};

// Properties of the current device, read once a device.
inline Device current_device() {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<uint64_t>, kMaxDevices> known{};
  int id = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return {0, 1, (48 << 10) - kStaticSmem};
  uint64_t packed = id < kMaxDevices ? known[id].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int major = 0, sms = 1, smem = 48 << 10;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id);
    cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    packed = static_cast<uint64_t>(major) << 56 | static_cast<uint64_t>(sms) << 32 | static_cast<uint32_t>(smem);
    if (id < kMaxDevices) known[id].store(packed, std::memory_order_relaxed);
  }
  return {static_cast<int>(packed >> 56), static_cast<int>(packed >> 32 & 0xffffff),
          static_cast<int>(packed & 0xffffffff) - kStaticSmem};
}

// Lets a kernel ask for all the shared memory that a block of the current device can have, not for what one launch
// needs: the setting is the kernel's, and other threads may launch it too. CUDA is told once.
inline cudaError_t allow_dynamic_smem(const void* kernel) {
  static std::mutex mutex;
  static auto* const told = new std::set<std::pair<const void*, int>>();  // never destroyed: threads outlive statics
  int id = 0;
  cudaError_t status = cudaGetDevice(&id);
  if (status != cudaSuccess) return status;
  const std::lock_guard<std::mutex> lock(mutex);
  if (told->count({kernel, id})) return cudaSuccess;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, current_device().dynamic_smem);
  if (status == cudaSuccess) told->insert({kernel, id});
  return status;
}

// Launches kernel(params), opted in to more shared memory where 48 KiB may not do. `overlap` lets the launch start
// while the previous kernel of the stream drains (compute capability 9.0 and up, ignored before): such a kernel must
// call wait_for_previous_kernel() before it touches that kernel's results. `cluster`: neighbouring blocks that are one
// cluster; only where there is room for them (clusters_at_once).
template <class Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, dim3 grid, dim3 block, size_t smem,
                   cudaStream_t stream, bool overlap = false, int cluster = 1) {
  if (smem > (48u << 10) - kStaticSmem) {
    const cudaError_t refused = allow_dynamic_smem(reinterpret_cast<const void*>(kernel));
    if (refused != cudaSuccess) {
      cudaGetLastError();  // clear it: the caller reports it, the next op must not
      return refused;
    }
  }
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params);
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// Clusters of a kernel that the current device runs at once; 0: the code that was loaded for the kernel knows none, or
// they find no room. CUDA is asked once.
template <class Params>
int clusters_at_once(void (*kernel)(Params), int threads, size_t smem, int cluster) {
  using Key = std::tuple<int, int, size_t, int>;
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<const void*, Key>, int>();  // as above
  const void* const function = reinterpret_cast<const void*>(kernel);
  int id = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [place, is_new] = known->insert({{function, {id, threads, smem, cluster}}, 0});
  if (!is_new) return place->second;
  cudaFuncAttributes attributes{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncGetAttributes(&attributes, function) != cudaSuccess || attributes.ptxVersion < 90 ||
      allow_dynamic_smem(function) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, function, &config) != cudaSuccess) {
    cudaGetLastError();  // clear it: the caller takes another way, the next op must not see it
    return 0;
  }
  return place->second = clusters;
}

inline const char* describe(cudaError_t status) { return status == cudaSuccess ? nullptr : cudaGetErrorString(status); }

}  // namespace fusedops::cuda
