// Kernels with a fault each, for the tests of the emulator.
#pragma once

struct PlantParams {
  float* out;      // [32]
  int beyond = 0;  // what is added to an index that would be right: not known when compiling
};

// The kernel with a fault of that name, or null. They take 32 threads and 128 bytes of dynamic shared memory.
using PlantedKernel = void (*)(PlantParams);
PlantedKernel planted_kernel(const char* name);
