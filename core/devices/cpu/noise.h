// Measures noise (api/noise.h) in a pass over tiles that decodes one rank's values after the other.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/noise.h"

namespace cccl {

// Of the whole payload. Each window is measured by one thread, whichever it is.
class NoiseSample {
 public:
  using Window = NoiseWindow;

  NoiseSample(std::size_t ranks, std::size_t count)
      : ranks_(ranks), count_(count), windows_(noise_windows(count)) {}

  // Whether values from `first` on, at a multiple of the tiles' length, are to be looked at.
  static bool begins_at(std::size_t first) { return first % kNoiseStride == 0; }

  void set(std::size_t first, const Window& window) { windows_[first / kNoiseStride] = window; }

  std::uint64_t statistics() const {
    Window all;
    for (const auto& window : windows_) all.add(window);
    const std::size_t values = noise_values(count_);
    const double of_ranks = noise_divisor(count_, static_cast<double>(ranks_));
    return pack_noise(static_cast<float>(std::sqrt(all.deviations / of_ranks)),
                      static_cast<float>(std::sqrt(all.squares / static_cast<double>(values))),
                      all.zeros, values);
  }

 private:
  const std::size_t ranks_, count_;
  std::vector<Window> windows_;
};

// Of a window's values, AcrossRanks in columns.
class NoiseColumns {
 public:
  // Those of a rank: of each in turn.
  template <class Real>
  void take(std::size_t rank, std::size_t n, const Real* values) {
    n = std::min(n, kNoisePiece);
    for (std::size_t i = 0; i < n; ++i) {
      AcrossRanks value{first_[i], sum_[i], squares_[i]};
      rank == 0 ? value.begin(values[i]) : value.add(values[i]);
      first_[i] = value.first;
      sum_[i] = value.sum;
      squares_[i] = value.squares;
    }
  }

  NoiseSample::Window window(std::size_t n, std::size_t of_ranks) const {
    n = std::min(n, kNoisePiece);
    const auto ranks = static_cast<double>(of_ranks);
    NoiseSample::Window found;
    Column deviations{}, squares{};
    for (std::size_t i = 0; i < n; ++i) {
      const AcrossRanks value{first_[i], sum_[i], squares_[i]};
      const double mean = value.mean(ranks);
      deviations[i] = value.deviations(ranks);
      squares[i] = mean * mean;
      found.zeros += mean == 0;
    }
    for (std::size_t half = kNoisePiece / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) {
        deviations[i] += deviations[i + half];
        squares[i] += squares[i + half];
      }
    }
    found.deviations = deviations[0];
    found.squares = squares[0];
    return found;
  }

 private:
  using Column = std::array<double, kNoisePiece>;
  Column first_, sum_, squares_;
};

}  // namespace cccl
