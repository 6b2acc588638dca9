// Cells of a sparse payload on a CPU: which values they hold, and reading them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "codecs/sparse/sparse.h"
#include "devices/cpu/tile_codec.h"

namespace cccl::sparse {

static_assert(kCell == kTile, "cells pass between codecs as tiles");

// For elements of one size, as they lie in memory. Places are bits of a mask: bit i % 64 of word
// i / 64.
struct WordKernels {
  // The places of elements whose bits under `bits` are `least` or more, and how many they are.
  void (*select)(const std::byte* elements, std::size_t n, std::uint64_t bits, std::uint64_t least,
                 std::uint64_t* mask);
  std::size_t (*count)(const std::byte* elements, std::size_t n, std::uint64_t bits,
                       std::uint64_t least);
  // Elements at n places, side by side; and back.
  void (*gather)(const std::byte* elements, const std::uint16_t* places, std::size_t n,
                 std::byte* out);
  void (*scatter)(const std::byte* elements, const std::uint16_t* places, std::size_t n,
                  std::byte* out);
};

// Elements of `size` bytes: 1, 2, 4 or 8.
const WordKernels& kernels_for(std::size_t size);

// Values as their elements.
template <class Real>
const std::byte* bytes_of(const Real* values) {
  return reinterpret_cast<const std::byte*>(values);
}
template <class Real>
std::byte* bytes_of(Real* values) {
  return reinterpret_cast<std::byte*>(values);
}

// Magnitudes as integers, which order as they do.
template <class Real>
using Bits = std::conditional_t<sizeof(Real) == 8, std::uint64_t, std::uint32_t>;
template <class Real>
inline constexpr std::uint64_t kMagnitude = std::numeric_limits<Bits<Real>>::max() >> 1;

// What a cell holds.
struct Places {
  Entry entry;
  std::uint64_t mask[kCell / 64];
  std::uint16_t at[kCell + 256];  // entry.values of them, unless dense; room for skips read as such
};

constexpr std::size_t mask_words(std::size_t n) { return (n + 63) / 64; }

// The mask of elements that have any bit, whatever they are.
void select_elements(const std::byte* elements, std::size_t n, std::size_t size,
                     std::uint64_t* mask);

// Of values that are no zero and not dropped. Inf and NaN always stay.
template <class Real>
void select_values(const Settings& settings, const Real* values, std::size_t n,
                   std::uint64_t* mask);

// Completes what begins with a mask: places, and the form that takes the fewest bytes.
void choose_form(const Settings& settings, const TileCodec& inner, DType dtype, std::size_t n,
                 Places& places);

// Writes a cell's positions, filled up to whole words. Returns what follows them.
std::byte* write_positions(const Places& places, std::size_t n, std::byte* at);

// The bytes of a body behind `directory`, which is there as a whole. Throws CorruptPayloadError for
// a row that no cell has.
std::size_t bytes_of_cells(const std::byte* directory, const TileCodec& inner, DType dtype,
                           std::size_t count);

// Reads a payload's cells in order. Its directory has been checked, its positions are as it goes.
class CellReader {
 public:
  CellReader(Bytes payload, const TileCodec& inner, DType dtype, std::size_t count);

  // Goes on to the next cell.
  void advance();

  bool dense() const { return places_.entry.form == Form::kDense; }
  std::size_t held() const { return places_.entry.values; }
  const std::uint16_t* places() const { return places_.at; }
  const std::byte* elements() const { return values_; }

  template <class Real>
  void decode(Real* held) const {
    const std::size_t n = places_.entry.values;
    if (n) inner_->decode_tile({const_cast<std::byte*>(values_), dtype_, n, 0, n}, held);
  }

 private:
  void read_bitmap(const std::byte* positions);
  void read_gaps(const std::byte* positions);

  const TileCodec* inner_;
  DType dtype_;
  std::size_t count_, first_ = 0, n_ = 0, next_first_ = 0;
  const std::byte *directory_, *next_, *values_ = nullptr;
  Places places_;
};

}  // namespace cccl::sparse
