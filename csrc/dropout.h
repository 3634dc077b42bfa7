// Dropout without a stored mask: what an element is multiplied with depends on a seed, its row and its column alone, so
// backward and every other backend find the same again. fusedops/ops/dropout.py says the same in plain torch.
#pragma once

#include <cstdint>

#include "philox.h"

namespace fusedops {

struct Dropout {
  const int64_t* seed;  // [2]: key and offset, in the device's memory; null: nothing is dropped
  uint32_t threshold;   // an element is kept where its random word is not below
  double scale;         // of those kept
};

// The share p of elements is dropped, to the nearest multiple of 2^-32; none is kept at p = 1, whatever the words.
inline Dropout make_dropout(const int64_t* seed, double p) {
  const auto threshold = static_cast<uint64_t>(p * 0x1p32 + 0.5);
  if (threshold > UINT32_MAX) return {seed, UINT32_MAX, 0};
  return {seed, static_cast<uint32_t>(threshold), 1 / (1 - p)};
}

// What kN elements of a row are multiplied with, from column `col` on, which is a multiple of kN or of 4. Four
// neighbours share a call of philox, whose words are theirs in order.
template <int kN, class acc_t>
FUSEDOPS_HOST_DEVICE void dropout_factors(const Dropout& d, int64_t row, int64_t col, acc_t (&factor)[kN]) {
  static_assert(kN == 2 || kN % 4 == 0);
  const auto key = static_cast<uint64_t>(d.seed[0]), index = static_cast<uint64_t>(row);
  const acc_t scale = static_cast<acc_t>(d.scale);
  for (int j = 0; j < kN; j += 4) {
    const Words4 counter{{static_cast<uint32_t>((col + j) / 4), static_cast<uint32_t>(index),
                          static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(d.seed[1])}};
    const Words4 bits = philox(counter, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    for (int k = 0; k < (kN < 4 ? kN : 4); ++k) {
      const uint32_t word = kN == 2 && col % 4 != 0 ? bits.word[2 + k] : bits.word[k];
      factor[j + k] = word >= d.threshold ? scale : acc_t(0);
    }
  }
}

}  // namespace fusedops
