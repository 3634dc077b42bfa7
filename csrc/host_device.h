// Functions that the host, the CPU kernels and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define FUSEDOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSEDOPS_HOST_DEVICE inline __attribute__((always_inline))  // into one CPU function per instruction set
#endif
