// What the norms share on the CPU beside rows.h: dropout.
#pragma once

#include "../norm.h"
#include "rows.h"

namespace fusedops::cpu {

template <class acc_t>
FUSEDOPS_ISA_INLINE void drop(const Dropout& dropout, int64_t row, int64_t hidden, acc_t* values) {
  acc_t factor[4];
  for (int64_t col = 0; col < hidden; col += 4) {
    dropout_factors(dropout, row, col, factor);
    for (int64_t k = 0; k < std::min<int64_t>(4, hidden - col); ++k) values[col + k] *= factor[k];
  }
}

}  // namespace fusedops::cpu
