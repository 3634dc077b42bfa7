// Runs CUDA kernels on the CPU, under g++ and its sanitizers: force-included before an unchanged .cu file.
//
// The threads of a block are fibers, run in turn until each meets a barrier; blocks run one after the other. Barriers,
// shuffles and asynchronous copies do what CUDA documents, and what CUDA leaves undefined is an error here: a barrier
// that not all of its threads reach, or that they reach in two places, a shuffle whose source does not take part, a
// misaligned copy, more shared memory than the device has. A copy lands only when it is waited for; shared memory
// starts as NaN, static one at each launch. Kernels take one struct.
//
// AddressSanitizer sees what leaves an array, shared or not. It guards a `__shared__` array, a static variable here,
// only where that has internal linkage; hence kernels, and __forceinline__ functions, which may have such arrays too,
// are static.
#pragma once

#define FUSEDOPS_EMULATED

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
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
#undef __global__
#define __global__ static
#undef __forceinline__
#define __forceinline__ static inline
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
  int major = 9;
};
inline Device device;
inline long launches = 0;

constexpr int kWarpSize = 32;
constexpr size_t kSmemAlign = 16;
constexpr size_t kStackBytes = 64 << 10;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// A line of the kernel under test: as a default argument, that of the call.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// What a thread waits for.
struct Wait {
  const char* what;
  Site site;
  int id = -1;  // of the barrier, where there are several
  std::string text() const {
    const char* name = strrchr(site.file, '/');
    const std::string number = id < 0 ? "" : " " + std::to_string(id);
    return what + number + " at " + (name ? name + 1 : site.file) + ":" + std::to_string(site.line);
  }
};

struct Fiber {
  ucontext_t context;
  uint3 thread;
  unsigned rank = 0;  // of the thread in its block
  bool done = false;
  Wait waits_for{};
  std::vector<std::vector<Copy>> copies{1};  // groups, the last one open
};

// Threads that have arrived, where, and how often all had.
struct Barrier {
  int arrived = 0;
  long passed = 0;
  Wait first{};
};

struct Block {
  std::vector<Fiber> fibers;
  std::unique_ptr<unsigned char, decltype(&free)> smem{nullptr, free};  // ends where the kernel's share ends
  std::map<std::pair<int, int>, Barrier> barriers;                      // (id, threads)
  std::map<std::pair<unsigned, unsigned>, Barrier> warps;               // (warp, mask)
  std::vector<std::array<unsigned char, 16>> slots;                     // what each thread shows to its warp
  long progress = 0;
};

inline Block* block = nullptr;
inline Fiber* fiber = nullptr;
inline ucontext_t scheduler;
inline const std::function<void()>* body = nullptr;
inline const void* kernel = nullptr;                 // that is running
inline std::vector<std::unique_ptr<char[]>> stacks;  // used again by each block

// "norm_fwd_kernel<float, float, true, 1>, block 3,0"
inline std::string where() {
  char name[512] = "?";
  void* return_address = const_cast<char*>(static_cast<const char*>(kernel) + 1);  // it looks at the byte before
  __sanitizer_symbolize_pc(return_address, "%f", name, sizeof name);
  return std::string(name) + ", block " + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y);
}

[[noreturn]] inline void fail(const std::string& what) {
  fprintf(stderr, "cuda_emulator: %s, thread %u: %s\n", where().c_str(), fiber->rank, what.c_str());
  fflush(stderr);
  std::abort();  // exceptions do not cross fibers
}

// Memory of the `__shared__` arrays of the .cu files, made known below.
struct Memory {
  void* begin;
  size_t size;
};
inline std::vector<Memory>& static_smem() {
  static std::vector<Memory> all;
  return all;
}

// What is wrong with a whole block is thrown from launch(), so that a test can expect it.
struct Deadlock : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void resume_scheduler() { swapcontext(&fiber->context, &scheduler); }

inline void wait(Barrier& barrier, int expected, const Wait& here) {
  if (barrier.arrived == 0) barrier.first = here;
  if (here.site.line != barrier.first.site.line || strcmp(here.site.file, barrier.first.site.file) != 0) {
    fail("it meets " + here.text() + " while others wait at " + barrier.first.text());
  }
  const long pass = barrier.passed;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.passed;
    ++block->progress;
    return;
  }
  Fiber* self = fiber;
  self->waits_for = here;
  while (barrier.passed == pass) resume_scheduler();
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
    // AddressSanitizer would forget the limits of the fiber's local arrays at each switch to a stack it is told of; so
    // it is told of none, and forgets once, what the block before has left.
    f.context.uc_stack = {};
    ASAN_UNPOISON_MEMORY_REGION(stacks[t].get(), kStackBytes);
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
      for (const Fiber& f : b.fibers) f.done ? ++done : ++waiting[f.waits_for.text()];
      std::string what = where() + ": a barrier that not all threads reach: ";
      for (const auto& [place, n] : waiting) what += std::to_string(n) + " wait at " + place + ", ";
      what += std::to_string(done) + " have returned";
      throw Deadlock(what);
    }
  }
}

inline void run_grid(const void* function, dim3 grid, dim3 size, size_t smem, const std::function<void()>& f) {
  ++launches;
  kernel = function;
  body = &f;
  for (const Memory& memory : static_smem()) memset(memory.begin, 0xff, memory.size);
  gridDim = grid;
  blockDim = size;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        Block b;
        blockIdx = {x, y, z};
        void* bytes = nullptr;
        if (posix_memalign(&bytes, kSmemAlign, smem) != 0) std::abort();
        b.smem.reset(static_cast<unsigned char*>(bytes));
        memset(b.smem.get(), 0xff, smem);
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
T shuffle(unsigned mask, T value, int source, int width, Site site) {
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
  wait(barrier, expected, {"a shuffle", site});
  T result = value;
  if (inside) memcpy(&result, block->slots[warp * kWarpSize + source].data(), sizeof result);
  wait(barrier, expected, {"a shuffle", site});
  return result;
}

inline int lane() { return static_cast<int>(fiber->rank % kWarpSize); }

template <class T>
bool is_aligned(const T* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

}  // namespace emulator

// AddressSanitizer's runtime is told of every static variable, with its name and source, as a program starts; this
// stands before it and keeps those that kernels share. In a .cu file no other variable may start as zero.
extern "C" char __bss_start, _end;
extern "C" __attribute__((weak, used, no_sanitize("address", "undefined"))) void __asan_register_globals(void* list,
                                                                                                         long count) {
  struct Global {
    char* begin;
    size_t size, size_with_redzone;
    const char *name, *source;
    uintptr_t rest[3];
  };
  static const auto register_globals = reinterpret_cast<void (*)(void*, long)>(dlsym(RTLD_NEXT, __func__));
  register_globals(list, count);
  for (long i = 0; i < count; ++i) {
    const Global& global = static_cast<const Global*>(list)[i];
    const char* suffix = strrchr(global.source, '.');
    const bool zero = global.begin >= &__bss_start && global.begin < &_end,
               coverage = strncmp(global.name, "__", 2) == 0;
    if (zero && !coverage && suffix && strcmp(suffix, ".cu") == 0) {
      emulator::static_smem().push_back({global.begin, global.size});
    }
  }
}

// ---- built-ins ------------------------------------------------------------------------------------------------------

using std::max;
using std::min;

inline void __syncthreads(emulator::Site site = emulator::Site::here()) {
  auto& b = *emulator::block;
  emulator::wait(b.barriers[{0, static_cast<int>(b.fibers.size())}], b.fibers.size(), {"__syncthreads", site});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, emulator::Site site = emulator::Site::here()) {
  emulator::shuffle(mask, 0, emulator::lane(), 32, site);
}
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, emulator::Site site = emulator::Site::here()) {
  const int base = emulator::lane() / width * width;
  return emulator::shuffle(mask, v, base + source % width, width, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(mask, v, emulator::lane() ^ bits, width, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(mask, v, emulator::lane() + static_cast<int>(delta), width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(mask, v, emulator::lane() - static_cast<int>(delta), width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::here()) {
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) bits |= static_cast<unsigned>(emulator::shuffle(mask, predicate != 0, i, 32, site)) << i;
  }
  return bits;
}
inline int __any_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::here()) {
  return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::here()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> bits % 32);
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }

// ---- csrc/cuda/ptx.cuh ----------------------------------------------------------------------------------------------

namespace fusedops::cuda {

inline unsigned char* dynamic_smem() { return emulator::block->smem.get(); }

template <int kBytes>
void start_copy(void* shared, const void* global, bool valid = true) {
  if (!emulator::is_aligned(static_cast<char*>(shared), kBytes) ||
      !emulator::is_aligned(static_cast<const char*>(global), kBytes)) {
    emulator::fail("a copy of " + std::to_string(kBytes) + " bytes is not aligned");
  }
  static const unsigned char zeros[kBytes] = {};
  emulator::fiber->copies.back().push_back({shared, valid ? global : zeros, kBytes});
}

template <int kBytes>
void start_copy_of(void* shared, const void* global, int bytes) {
  if (bytes < 0 || bytes > kBytes) emulator::fail("a copy of " + std::to_string(bytes) + " bytes");
  start_copy<kBytes>(shared, global, false);
  if (bytes == 0) return;
  if (!emulator::is_aligned(static_cast<const char*>(global), kBytes)) emulator::fail("a copy is not aligned");
  auto& copies = emulator::fiber->copies.back();
  copies.push_back({shared, global, static_cast<size_t>(bytes)});
}

inline void prefetch(const void*) {}

// A cluster is one block here.
inline int cluster_rank() { return 0; }
inline void start_in_cluster() {}
inline void wait_for_cluster() {}
template <class T>
void store_to_block(T* shared, int, T x) {
  *shared = x;
}
inline void sync_cluster() { __syncthreads(); }

template <class Raw>
void load_in_place(Raw& v, const void* global) {
  v = *static_cast<const Raw*>(global);
}

template <class Raw>
void store_whole(void* global, Raw v) {
  *static_cast<Raw*>(global) = v;
}

inline float exp2_flushed(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;  // a NaN is not
}

inline void stop_kernel(const char* message) { emulator::fail(message); }

inline void commit_copies() { emulator::fiber->copies.emplace_back(); }

template <int kPending>
void wait_copies() {
  auto& groups = emulator::fiber->copies;
  while (groups.size() > kPending + 1) {
    for (const auto& copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
    groups.erase(groups.begin());
  }
}

inline void sync_group(int barrier, int threads, emulator::Site site = emulator::Site::here()) {
  if (barrier < 1 || barrier > 15) emulator::fail("there is no barrier " + std::to_string(barrier));
  emulator::wait(emulator::block->barriers[{barrier, threads}], threads, {"barrier", site, barrier});
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
  *value = attribute == cudaDevAttrMultiProcessorCount      ? emulator::device.sms
           : attribute == cudaDevAttrComputeCapabilityMajor ? emulator::device.major
                                                            : emulator::device.block_smem;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes <= emulator::device.block_smem ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = 80;  // code without clusters
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveClusters(int*, const void*, const cudaLaunchConfig_t*) {
  return cudaErrorInvalidValue;
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
  emulator::run_grid(reinterpret_cast<const void*>(kernel), grid, size, config->dynamicSmemBytes,
                     [&] { kernel(params); });
  return cudaSuccess;
}
