// The numbers of the diff format that every device shares. FORMAT.md is the specification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "api/codec.h"

namespace cccl::diff {

inline constexpr std::size_t kCell = 2048;   // values that share a factor
inline constexpr std::size_t kBlock = 128;   // whose largest values tell whether a prediction helps
inline constexpr std::size_t kFront = 16;    // bytes in front of the factors
inline constexpr std::size_t kAligned = 16;  // what the inner body begins at a multiple of
inline constexpr int kUnit = 64;             // the factor 1
inline constexpr int kMostFactor = 127;
inline constexpr std::size_t kSums = 16;  // of products

// What the first bytes of a body say.
struct Front {
  std::uint64_t position = 0;  // of the first value in the tensor
  std::uint64_t number = 0;    // of the prediction; 0: none
};
static_assert(sizeof(Front) == kFront);

constexpr std::size_t cells_of(std::size_t n) { return n / kCell + (n % kCell != 0); }

// Where the inner codec's body begins in that of n values.
constexpr std::size_t inner_begin(std::size_t n) {
  return n == 0 ? 0 : kFront + (cells_of(n) + kAligned - 1) / kAligned * kAligned;
}

// Of a diff codec on a CPU.
std::shared_ptr<const Codec> inner_of(const Codec& codec);

}  // namespace cccl::diff
