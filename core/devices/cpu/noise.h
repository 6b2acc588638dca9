// Measures noise (api/noise.h) in a pass over tiles that decodes one rank's values after the other.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "api/noise.h"

namespace cccl {

class NoiseSample {
 public:
  NoiseSample(std::size_t ranks, std::size_t count)
      : ranks_(ranks), values_(noise_values(count)) {}

  // Whether values from `first` on, at a multiple of the tiles' length, are to be looked at.
  static bool begins_at(std::size_t first) { return first % kNoiseStride == 0; }

  // Of such a tile, the values of a rank: of each in turn.
  template <class Real>
  void take(std::size_t rank, std::size_t n, const Real* values) {
    n = std::min(n, kNoisePiece);
    if (rank == 0)
      for (std::size_t i = 0; i < n; ++i) across_[i].begin(values[i]);
    else
      for (std::size_t i = 0; i < n; ++i) across_[i].add(values[i]);
    if (rank + 1 == ranks_) add_up(n);
  }

  std::uint64_t statistics() {
    for (std::size_t half = kNoisePiece / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) {
        variances_[i] += variances_[i + half];
        squares_[i] += squares_[i + half];
      }
    }
    const auto values = static_cast<double>(values_);
    return pack_noise(static_cast<float>(std::sqrt(variances_[0] / values)),
                      static_cast<float>(std::sqrt(squares_[0] / values)), zeros_, values_);
  }

 private:
  void add_up(std::size_t n) {
    const auto ranks = static_cast<double>(ranks_);
    for (std::size_t i = 0; i < n; ++i) {
      const double mean = across_[i].mean(ranks);
      variances_[i] += across_[i].variance(ranks);
      squares_[i] += mean * mean;
      zeros_ += mean == 0;
    }
  }

  const std::size_t ranks_, values_;
  std::array<AcrossRanks, kNoisePiece> across_;
  std::array<double, kNoisePiece> variances_{}, squares_{};
  std::uint64_t zeros_ = 0;
};

}  // namespace cccl
