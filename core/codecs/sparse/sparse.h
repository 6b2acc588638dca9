// The numbers of the sparse format that every device shares. FORMAT.md is the specification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "api/codec.h"

namespace cccl::sparse {

// Values that are encoded together, whatever the tensor around them. A multiple of every block
// size.
inline constexpr std::size_t kCell = 2048;

// What a cell drops and when it is worth it. 0: not asked for.
struct Settings {
  double sparsity = 0.5;  // share of zeros above which a cell is not dense
  double top_k = 0, threshold = 0;

  bool drops() const { return top_k > 0 || threshold > 0; }
};

// Of a sparse codec on a CPU.
const Settings& settings_of(const Codec& codec);
std::shared_ptr<const Codec> inner_of(const Codec& codec);

// How a cell says where its values are.
enum class Form : std::uint8_t { kDense = 0, kBitmap = 1, kGaps = 2 };

// A cell's row in the directory at the body's start.
struct Entry {
  std::uint16_t values = 0;  // held
  Form form = Form::kDense;
  std::uint8_t skips = 0;  // gap bytes that stand for kSkip places without a value
};
static_assert(sizeof(Entry) == 4);

inline constexpr std::size_t kSkip = 255;

constexpr std::size_t cells_of(std::size_t n) { return n / kCell + (n % kCell != 0); }

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 3) / 4 * 4; }

// Bytes of a cell's positions, before padding. `n`: values of the tensor in this cell.
constexpr std::size_t position_bytes(const Entry& entry, std::size_t n) {
  return entry.form == Form::kBitmap ? (n + 7) / 8
         : entry.form == Form::kGaps ? std::size_t{entry.values} + entry.skips
                                     : 0;
}

}  // namespace cccl::sparse
