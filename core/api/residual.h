// What codecs lost of a tensor's values in earlier steps, kept to be added to the next ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cccl {

// How a residual is kept: rounded to 32, 16 or 8 bits, the last as blocks of block_float8.
enum class ResidualType : std::uint8_t { kFloat32, kBFloat16, kBlockFloat8 };

inline constexpr const char* kResidualTypes[] = {"float32", "bfloat16", "block_float8"};

// Parts of a residual begin at multiples of this many values.
constexpr std::size_t residual_granularity(ResidualType type) {
  return type == ResidualType::kBlockFloat8 ? 128 : 1;
}

// A part of one, from value `first` on, in memory aligned to kPayloadAlignment. `kept` is that of
// earlier steps; `next` is written, and holds once the step is known to be sound.
struct Residual {
  ResidualType type = ResidualType::kFloat32;
  const std::byte* kept = nullptr;  // of all `count` values
  std::byte* next = nullptr;
  std::size_t count = 0, first = 0;
  float decay = 1;  // what is kept is multiplied by it

  // In a device's memory, whose work alone knows: not 0 where `kept` and `next` have changed
  // places, and made 1 by values that are not finite.
  const std::uint32_t* swapped = nullptr;
  std::uint32_t* spoiled = nullptr;

  Residual from(std::size_t value) const {
    auto part = *this;
    part.first = value;
    return part;
  }
};

}  // namespace cccl
