// What CUDA C++ has no intrinsic for. A host that emulates CUDA brings its own (FUSEDOPS_EMULATED).
#pragma once

#include <type_traits>

#ifndef FUSEDOPS_EMULATED

#include <cassert>

namespace fusedops::cuda {

// The block's dynamic shared memory.
__device__ inline unsigned char* dynamic_smem() {
  extern __shared__ __align__(16) unsigned char fusedops_dynamic_smem[];
  return fusedops_dynamic_smem;
}

// Starts a copy of 4, 8 or 16 aligned bytes to shared memory, of zeros where not `valid`; done once wait_copies() says
// so. Before compute capability 8.0 it is a plain copy.
template <int kBytes>
__device__ inline void start_copy(void* shared, const void* global, bool valid = true) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
#else
  using Raw = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, unsigned> >;
  *static_cast<Raw*>(shared) = valid ? *static_cast<const Raw*>(global) : Raw{};
#endif
}

// Of 16 or 8 aligned bytes the first `bytes`, and zeros behind them: nothing else is read.
template <int kBytes>
__device__ inline void start_copy_of(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(kBytes), "r"(bytes)
               : "memory");
#else
  for (int i = 0; i < kBytes; i += 2) {
    const char* from = static_cast<const char*>(global) + i;
    *reinterpret_cast<short*>(static_cast<char*>(shared) + i) = i < bytes ? *reinterpret_cast<const short*>(from) : 0;
  }
#endif
}

// Stores 16 or 8 aligned bytes to global memory at once. Of an assignment the compiler made parts of 4 bytes where the
// same elements are also stored one by one, as in rows that may be misaligned.
__device__ inline void store_whole(void* global, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline void store_whole(void* global, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(v.x), "r"(v.y) : "memory");
}

// Loads 16, 8 or 4 aligned bytes that this kernel has not written: the compiler moves the load past no other such
// access, but may move an ordinary store past it. That the neighbours will be read too makes no difference in time and
// tells these loads from others in the machine code.
__device__ inline void load_in_place(uint4& v, const void* global) {
  asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
}
__device__ inline void load_in_place(uint2& v, const void* global) {
  asm volatile("ld.global.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(global));
}
__device__ inline void load_in_place(unsigned& v, const void* global) {
  asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(global));
}

// Asks for what lies there to be brought nearer; there need not be anything.
__device__ inline void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// 2^x; results below the smallest normal number are 0.
__device__ inline float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Ends the kernel, and all use of CUDA in the process, with a message on stderr: what assert() does, in builds that
// leave out assertions too.
__device__ inline void stop_kernel(const char* message) { __assert_fail(message, "fusedops", 0, ""); }

// Closes the group of copies that this thread has started since the last call.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// __syncthreads() for `threads` threads of the block, under one of the block's barriers 1 to 15.
__device__ inline void sync_group(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// In a kernel launched with `overlap`: returns when the previous kernel's writes are visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets a following kernel launched with `overlap` be set up from now on.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- blocks of a cluster: a row's own, several SMs wide. Before compute capability 9.0 each block is one of its own.

// The block's number in its cluster.
__device__ inline int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// Says that this block has started; another's shared memory may be written once all of the cluster have: after
// wait_for_cluster(), which every thread calls once.
__device__ inline void start_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores to the place that `shared` has in the shared memory of the cluster's block number `rank`; that block sees it
// after the next sync_cluster().
__device__ inline void store_to_block(float* shared, int rank, float x) {
#if __CUDA_ARCH__ >= 900
  const unsigned mine = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}" ::"r"(mine),
      "r"(rank), "f"(x)
      : "memory");
#else
  *shared = x;
#endif
}
__device__ inline void store_to_block(double* shared, int rank, double x) {
#if __CUDA_ARCH__ >= 900
  const unsigned mine = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f64 [there], %2;}" ::"r"(mine),
      "r"(rank), "d"(x)
      : "memory");
#else
  *shared = x;
#endif
}

// __syncthreads() for all blocks of the cluster.
__device__ inline void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

}  // namespace fusedops::cuda

#endif  // FUSEDOPS_EMULATED
