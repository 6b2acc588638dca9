// What a reduction may measure of the values that it adds up: how they differ from rank to rank.
// docs/FORMAT.md is the specification.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace cccl {

// Of each kNoiseStride values of a payload the first kNoisePiece are looked at.
inline constexpr std::size_t kNoiseStride = 16384, kNoisePiece = 1024;

constexpr std::size_t noise_values(std::size_t count) {
  const std::size_t rest = count % kNoiseStride;
  return count / kNoiseStride * kNoisePiece + (rest < kNoisePiece ? rest : kNoisePiece);
}

constexpr std::size_t noise_windows(std::size_t count) {
  return (count + kNoiseStride - 1) / kNoiseStride;
}

// One value, of one rank after the other: by differences from that of the first, so that equal
// values have no noise at all, and little is not lost beside a large mean.
struct AcrossRanks {
  double first = 0, sum = 0, squares = 0;

  constexpr void begin(double value) {
    first = value;
    sum = squares = 0;
  }
  constexpr void add(double value) {
    const double difference = value - first;
    sum += difference;
    squares += difference * difference;
  }
  constexpr double mean(double ranks) const { return first + sum / ranks; }
  // From the mean, the sum of squares: the variance times ranks - 1.
  constexpr double deviations(double ranks) const { return squares - sum * (sum / ranks); }
};

// Sums over the values that are looked at of one kNoiseStride.
struct NoiseWindow {
  double deviations = 0, squares = 0;
  std::uint64_t zeros = 0;

  constexpr void add(const NoiseWindow& other) {
    deviations += other.deviations;
    squares += other.squares;
    zeros += other.zeros;
  }
};

// Over how much the sum of deviations is averaged.
constexpr double noise_divisor(std::size_t count, double ranks) {
  return static_cast<double>(noise_values(count)) * (ranks > 1 ? ranks - 1 : 1);
}

// PayloadHeader::statistics: the roots of the mean variance between ranks and of the mean's mean
// square, each the upper 24 bits of a float, and 16 bits for the share of zeros in the mean.
constexpr std::uint64_t pack_noise(float deviation, float root_mean_square, std::uint64_t zeros,
                                   std::uint64_t values) {
  if (values == 0) return 0;
  const auto upper = [](float value) { return std::bit_cast<std::uint32_t>(value) >> 8; };
  const bool finite = deviation - deviation == 0 && root_mean_square - root_mean_square == 0;
  constexpr std::uint64_t kNan = 0x7FC000;
  const std::uint64_t deviation_bits = finite ? upper(deviation) : kNan;
  const std::uint64_t square_bits = finite ? upper(root_mean_square) : kNan;
  return deviation_bits | square_bits << 24 | (zeros * 65535 / values) << 48;
}

// Sums over the values of payloads.
struct Noise {
  double values = 0;
  double variances = 0;  // between ranks
  double squares = 0;    // of the mean
  double zeros = 0;      // of the mean

  // Of a payload of so many values. 0: nothing was measured.
  void add(std::uint64_t statistics, std::size_t count) {
    if (statistics == 0) return;
    const auto number = [](std::uint64_t bits) {
      const double root = std::bit_cast<float>(static_cast<std::uint32_t>(bits & 0xFFFFFF) << 8);
      return root * root;
    };
    const auto weight = static_cast<double>(count);
    values += weight;
    variances += weight * number(statistics);
    squares += weight * number(statistics >> 24);
    zeros += weight * static_cast<double>(statistics >> 48) / 65535;
  }
  void add(const Noise& other) {
    values += other.values;
    variances += other.variances;
    squares += other.squares;
    zeros += other.zeros;
  }
};

}  // namespace cccl
