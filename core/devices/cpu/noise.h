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
  NoiseSample(std::size_t ranks, std::size_t count) : ranks_(ranks), count_(count) {}

  // Whether values from `first` on, at a multiple of the tiles' length, are to be looked at.
  static bool begins_at(std::size_t first) { return first % kNoiseStride == 0; }

  // Of such a tile, the values of a rank: of each in turn.
  template <class Real>
  void take(std::size_t rank, std::size_t n, const Real* values) {
    n = std::min(n, kNoisePiece);
    for (std::size_t i = 0; i < n; ++i) {
      AcrossRanks value{first_[i], sum_[i], squared_[i]};
      rank == 0 ? value.begin(values[i]) : value.add(values[i]);
      first_[i] = value.first;
      sum_[i] = value.sum;
      squared_[i] = value.squares;
    }
    if (rank + 1 == ranks_) add_up(n);
  }

  std::uint64_t statistics() {
    for (std::size_t half = kNoisePiece / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) {
        deviations_[i] += deviations_[i + half];
        squares_[i] += squares_[i + half];
      }
    }
    const std::size_t values = noise_values(count_);
    const double of_ranks = noise_divisor(count_, static_cast<double>(ranks_));
    return pack_noise(static_cast<float>(std::sqrt(deviations_[0] / of_ranks)),
                      static_cast<float>(std::sqrt(squares_[0] / static_cast<double>(values))),
                      zeros_, values);
  }

 private:
  void add_up(std::size_t n) {
    const auto ranks = static_cast<double>(ranks_);
    for (std::size_t i = 0; i < n; ++i) {
      const AcrossRanks value{first_[i], sum_[i], squared_[i]};
      const double mean = value.mean(ranks);
      deviations_[i] += value.deviations(ranks);
      squares_[i] += mean * mean;
      zeros_ += mean == 0;
    }
  }

  using Piece = std::array<double, kNoisePiece>;
  const std::size_t ranks_, count_;
  Piece first_, sum_, squared_;  // AcrossRanks, in columns
  Piece deviations_{}, squares_{};
  std::uint64_t zeros_ = 0;
};

}  // namespace cccl
