// Random bits that depend on a counter and a key alone, hence the same in every backend and in whatever order.
// Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox4x32 with ten rounds.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fusedops {

struct Words4 {
  uint32_t word[4];
};

FUSEDOPS_HOST_DEVICE Words4 philox(const Words4& counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53u} * c0;
    const uint64_t odd = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(odd >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(odd);
    c2 = static_cast<uint32_t>(even >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(even);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace fusedops
