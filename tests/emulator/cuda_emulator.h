// Runs CUDA kernels on the CPU, under g++ and its sanitizers: force-included before an unchanged .cu file.
//
// The threads of a block are fibers, run in turn until each meets a barrier; blocks run one after the other. Barriers,
// shuffles and asynchronous copies do what CUDA documents, and what CUDA leaves undefined is an error here: a barrier
// that not all of its threads reach, a shuffle whose source does not take part, a misaligned copy, more shared memory
// than the device has. A copy lands only when it is waited for; shared memory starts as NaN. Kernels take one struct.
#pragma once

#define FUSEDOPS_EMULATED

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

// Of the thread that is running.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulator {

// The device that launchers are told of. A test may change it, and its id with it: launchers cache properties by id.
struct Device {
  int id = 0;
  int sms = 2;
  int block_smem = 227 << 10;
};
inline Device device;
inline long launches = 0;

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 128 << 10;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  ucontext_t context;
  uint3 thread;
  unsigned rank = 0;  // of the thread in its block
  bool done = false;
  std::string waits_for;
  std::vector<std::vector<Copy>> copies{1};  // groups, the last one open
};

// Threads that have arrived, and how often all had.
struct Barrier {
  int arrived = 0;
  long passed = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<unsigned char> smem;
  std::map<std::pair<int, int>, Barrier> barriers;         // (id, threads)
  std::map<std::pair<unsigned, unsigned>, Barrier> warps;  // (warp, mask)
  std::vector<std::array<unsigned char, 16>> slots;        // what each thread shows to its warp
  long progress = 0;
};

inline Block* block = nullptr;
inline Fiber* fiber = nullptr;
inline ucontext_t scheduler;
inline const std::function<void()>* body = nullptr;
inline std::vector<std::unique_ptr<char[]>> stacks;  // used again by each block

[[noreturn]] inline void fail(const std::string& what) {
  std::string where;
  if (block && fiber) {
    where = " (block " + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + " thread " +
            std::to_string(fiber->rank) + ")";
  }
  fprintf(stderr, "cuda_emulator: %s%s\n", what.c_str(), where.c_str());
  fflush(stderr);
  std::abort();  // exceptions do not cross fibers
}

// What is wrong with a whole block is thrown from launch(), so that a test can expect it.
struct Deadlock : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void resume_scheduler() { swapcontext(&fiber->context, &scheduler); }

inline void wait(Barrier& barrier, int expected, const char* name) {
  const long pass = barrier.passed;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.passed;
    ++block->progress;
    return;
  }
  Fiber* self = fiber;
  self->waits_for = name;
  while (barrier.passed == pass) resume_scheduler();
  self->waits_for.clear();
}

inline void run_fiber() {
  (*body)();
  fiber->done = true;
  ++block->progress;
  resume_scheduler();
}

inline void run_block() {
  Block& b = *block;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  b.fibers.resize(threads);
  b.slots.resize(threads);
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = b.fibers[t];
    f.rank = t;
    f.thread = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    if (stacks.size() <= t) stacks.emplace_back(new char[kStackBytes]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[t].get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, run_fiber, 0);
  }
  for (bool running = true; running;) {
    running = false;
    const long before = b.progress;
    for (Fiber& f : b.fibers) {
      if (f.done) continue;
      running = true;
      fiber = &f;
      threadIdx = f.thread;
      swapcontext(&scheduler, &f.context);
    }
    fiber = nullptr;
    if (running && b.progress == before) {
      std::map<std::string, int> waiting;
      int done = 0;
      for (const Fiber& f : b.fibers) f.done ? ++done : ++waiting[f.waits_for];
      std::string what = "a barrier that not all threads reach: " + std::to_string(done) + " threads have returned";
      for (const auto& [name, n] : waiting) what += ", " + std::to_string(n) + " wait at " + name;
      throw Deadlock(what);
    }
  }
}

inline void run_grid(dim3 grid, dim3 size, size_t smem, const std::function<void()>& f) {
  ++launches;
  body = &f;
  gridDim = grid;
  blockDim = size;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        Block b;
        blockIdx = {x, y, z};
        b.smem.assign(smem + 16, 0xff);
        block = &b;
        run_block();
        block = nullptr;
      }
    }
  }
}

// One exchange of a warp: every thread of `mask` shows `value`; the result is the value of lane `source`, or the
// thread's own where there is no such lane.
template <class T>
T shuffle(unsigned mask, T value, int source, int width) {
  static_assert(sizeof(T) <= 16);
  const unsigned lane = fiber->rank % kWarpSize, warp = fiber->rank / kWarpSize;
  const unsigned lanes = std::min<unsigned>(kWarpSize, block->fibers.size() - warp * kWarpSize);
  if (!(mask >> lane & 1)) fail("a thread is not in the mask of its own shuffle");
  if (lanes < 32 && mask >> lanes) fail("a mask names lanes that the block does not have");
  const int base = lane / width * width;
  const bool inside = source >= base && source < base + width;
  if (inside && !(mask >> source & 1)) fail("a shuffle reads from a lane that does not take part");
  Barrier& barrier = block->warps[{warp, mask}];
  const int expected = __builtin_popcount(mask);
  const unsigned self = fiber->rank;
  memcpy(block->slots[self].data(), &value, sizeof value);
  wait(barrier, expected, "a shuffle");
  T result = value;
  if (inside) memcpy(&result, block->slots[warp * kWarpSize + source].data(), sizeof result);
  wait(barrier, expected, "a shuffle");
  return result;
}

inline int lane() { return static_cast<int>(fiber->rank % kWarpSize); }

template <class T>
bool is_aligned(const T* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

}  // namespace emulator

// ---- built-ins ------------------------------------------------------------------------------------------------------

using std::max;
using std::min;

inline void __syncthreads() {
  auto& b = *emulator::block;
  emulator::wait(b.barriers[{0, static_cast<int>(b.fibers.size())}], b.fibers.size(), "__syncthreads");
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::shuffle(mask, 0, emulator::lane(), 32); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const int base = emulator::lane() / width * width;
  return emulator::shuffle(mask, v, base + source % width, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  return emulator::shuffle(mask, v, emulator::lane() ^ bits, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  return emulator::shuffle(mask, v, emulator::lane() + static_cast<int>(delta), width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  return emulator::shuffle(mask, v, emulator::lane() - static_cast<int>(delta), width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) bits |= static_cast<unsigned>(emulator::shuffle(mask, predicate != 0, i, 32)) << i;
  }
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, const T& v) {
  *p = v;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// ---- csrc/cuda/ptx.cuh ----------------------------------------------------------------------------------------------

namespace fusedops::cuda {

inline unsigned char* dynamic_smem() {
  auto* p = emulator::block->smem.data();
  return p + (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16;
}

template <int kBytes>
void start_copy(void* shared, const void* global) {
  if (!emulator::is_aligned(static_cast<char*>(shared), kBytes) ||
      !emulator::is_aligned(static_cast<const char*>(global), kBytes)) {
    emulator::fail("a copy of " + std::to_string(kBytes) + " bytes is not aligned");
  }
  emulator::fiber->copies.back().push_back({shared, global, kBytes});
}

inline void commit_copies() { emulator::fiber->copies.emplace_back(); }

template <int kPending>
void wait_copies() {
  auto& groups = emulator::fiber->copies;
  while (groups.size() > kPending + 1) {
    for (const auto& copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
    groups.erase(groups.begin());
  }
}

inline void sync_group(int barrier, int threads) {
  if (barrier < 1 || barrier > 15) emulator::fail("there is no barrier " + std::to_string(barrier));
  emulator::wait(emulator::block->barriers[{barrier, threads}], threads, "sync_group");
}

inline void wait_for_previous_kernel() {}
inline void allow_next_kernel() {}

}  // namespace fusedops::cuda

// ---- the run-time library, as far as csrc/cuda/launch.h calls it
// -----------------------------------------------------

extern "C" {
inline cudaError_t cudaGetDevice(int* id) {
  *id = emulator::device.id;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulator::device.sms : emulator::device.block_smem;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes <= emulator::device.block_smem ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "refused by the emulator";
}
}

template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  const dim3 grid = config->gridDim, size = config->blockDim;
  const long threads = static_cast<long>(size.x) * size.y * size.z;
  if (threads < 1 || threads > 1024 || grid.x < 1 || grid.y < 1 || grid.y > 65535 || grid.z > 65535 ||
      config->dynamicSmemBytes > static_cast<size_t>(emulator::device.block_smem)) {
    return cudaErrorInvalidConfiguration;
  }
  emulator::run_grid(grid, size, config->dynamicSmemBytes, [&] { kernel(params); });
  return cudaSuccess;
}
