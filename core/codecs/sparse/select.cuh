// Which values of a cell an encoder holds, and in what form. FORMAT.md, "Encode".
#pragma once

#include "codecs/sparse/sparse.cuh"

namespace cccl::sparse {

// Held is an element that has `least` or more in these of its bits.
struct Selection {
  std::uint64_t bits, least;
  std::uint64_t infinity;  // of magnitudes from here on all stay
  bool top_k;              // of those, only CellLimits::kept: the largest
};

// What depends on how many values a cell has.
struct CellLimits {
  std::uint32_t zeros;  // a cell with fewer is dense
  std::uint32_t kept;   // by top-k
  std::uint32_t bytes;  // of a dense one's values
};

// A row's flags, kVector in each lane, to the mask.
template <int kVector>
__device__ inline void write_flags(std::uint32_t* mask, int row, std::uint32_t flags) {
  const int place = (row * kLanes + lane_id()) * kVector;
  if constexpr (kVector == 16) {
    reinterpret_cast<std::uint16_t*>(mask)[place / 16] = static_cast<std::uint16_t>(flags);
  } else {
#pragma unroll
    for (int step = 1; step * kVector < 8; step *= 2)
      flags |= __shfl_down_sync(~0u, flags, step) << step * kVector;
    if (place % 8 == 0)
      reinterpret_cast<std::uint8_t*>(mask)[place / 8] = static_cast<std::uint8_t>(flags);
  }
}

template <class Word, int kBytes>
__device__ inline std::uint32_t flags_of(const Chunk<kBytes>& chunk, Word bits, Word least) {
  std::uint32_t flags = 0;
#pragma unroll
  for (int v = 0; v < kBytes / static_cast<int>(sizeof(Word)); ++v)
    flags |= static_cast<std::uint32_t>((word_at<Word>(chunk, v) & bits) >= least) << v;
  return flags;
}

// use(row, chunk) for the elements of a cell in rows.
template <class Element, class Use>
__device__ inline void for_rows(const CellMemory<Element>& memory, Use use) {
  constexpr int kRowElements = kLanes * kChunkBytes / sizeof(Element);
#pragma unroll 4
  for (int row = 0; row < kCellSize / kRowElements; ++row) {
    const auto* const from =
        reinterpret_cast<const std::byte*>(memory.elements + row * kRowElements);
    use(row, read_chunk<kChunkBytes>(from));
  }
}

template <class Element>
__device__ inline void mask_from(const CellMemory<Element>& memory, std::uint64_t bits,
                                 std::uint64_t least, std::uint32_t* mask) {
  using Word = WordOf<Element>;
  for_rows(memory, [&](int row, const auto& chunk) {
    write_flags<kChunkBytes / static_cast<int>(sizeof(Word))>(
        mask, row, flags_of<Word>(chunk, static_cast<Word>(bits), static_cast<Word>(least)));
  });
  __syncwarp();
}

// The magnitude of which `kept` elements have that or more, or of more than those if several are
// equal: then `room` of these are among them.
template <class Word>
struct Least {
  Word magnitude;
  std::uint32_t equal, room;
};

// Byte by byte from the top: a histogram of those whose upper bytes are known to be the same. More
// than `kept` elements are not 0.
template <class Element>
__device__ inline Least<WordOf<Element>> least_kept(const Selection& selection, std::uint32_t kept,
                                                    CellMemory<Element>& memory) {
  using Word = WordOf<Element>;
  const auto bits = static_cast<Word>(selection.bits);
  Least<Word> least{0, 0, kept};
  Word known = 0;
  for (int shift = 8 * static_cast<int>(sizeof(Word)) - 8; shift >= 0; shift -= 8) {
    reinterpret_cast<uint4*>(memory.histogram)[lane_id()] = uint4{0, 0, 0, 0};
    __syncwarp();
    for_rows(memory, [&](int, const auto& chunk) {
#pragma unroll
      for (int v = 0; v < kChunkBytes / static_cast<int>(sizeof(Word)); ++v) {
        const auto magnitude = static_cast<Word>(word_at<Word>(chunk, v) & bits);
        const auto byte = static_cast<std::uint32_t>(magnitude >> shift & 255);
        if ((magnitude & known) == least.magnitude)
          atomicAdd(&memory.histogram[byte / 2], 1u << 16 * (byte % 2));
      }
    });
    __syncwarp();
    const uint4 own = reinterpret_cast<const uint4*>(memory.histogram)[lane_id()];
    const std::uint32_t words[4] = {own.x, own.y, own.z, own.w};  // of bytes 8 * lane_id() and on
    std::uint32_t mine = 0, all;
#pragma unroll
    for (const std::uint32_t word : words) mine += (word & 0xFFFF) + (word >> 16);
    const std::uint32_t in_front = scan_lanes(mine, all);
    std::uint32_t larger = all - in_front - mine;
    const bool here = larger < least.room && least.room <= larger + mine;
    int byte = 8;
    std::uint32_t equal = 0;
    if (here) {
      do {
        larger += equal;
        --byte;
        equal = words[byte / 2] >> 16 * (byte % 2) & 0xFFFF;
      } while (larger + equal < least.room);
    }
    const int lane = __ffs(__ballot_sync(~0u, here)) - 1;
    least.magnitude |= static_cast<Word>(8 * lane + __shfl_sync(~0u, byte, lane)) << shift;
    least.room -= __shfl_sync(~0u, larger, lane);
    least.equal = __shfl_sync(~0u, equal, lane);
    known |= static_cast<Word>(Word{255} << shift);
    __syncwarp();
    if (least.equal == least.room) break;  // whatever the lower bytes are
  }
  return least;
}

// Top-k: of the places in the mask those of the `kept` largest magnitudes, of equals the first.
template <class Element>
__device__ inline void keep_largest(const Selection& selection, std::uint32_t kept,
                                    CellMemory<Element>& memory) {
  const auto held = static_cast<std::uint32_t>(__popcll(own_places(memory.mask)));
  if (__reduce_add_sync(~0u, held) <= kept) return;
  const auto [magnitude, equal, room] = least_kept(selection, kept, memory);
  const auto infinity = static_cast<WordOf<Element>>(selection.infinity);
  mask_from(memory, selection.bits, min(magnitude, infinity), memory.mask);
  if (magnitude >= infinity || equal == room) return;
  mask_from(memory, selection.bits, magnitude + std::uint64_t{1}, memory.other_mask);
  const std::uint64_t larger = own_places(memory.other_mask);
  const std::uint64_t equals = own_places(memory.mask) & ~larger;
  std::uint32_t all;
  const std::uint32_t in_front = scan_lanes(static_cast<std::uint32_t>(__popcll(equals)), all);
  std::uint64_t left = equals;  // but for those that stay
  for (std::uint32_t i = in_front; i < room && left; ++i) left &= left - 1;
  const std::uint64_t places = larger | (equals & ~left);
  memory.mask[2 * lane_id()] = static_cast<std::uint32_t>(places);
  memory.mask[2 * lane_id() + 1] = static_cast<std::uint32_t>(places >> 32);
  __syncwarp();
}

// How a cell is written down.
struct Choice {
  Entry entry;
  std::uint32_t positions, values;  // bytes, filled up to whole words

  __device__ std::uint32_t bytes() const { return positions + values; }
  __device__ bool dense() const { return entry.form == Form::kDense; }
};

// The form that takes the fewest bytes. Turns the mask into gaps and places, or completes `before`.
template <class Element>
__device__ inline Choice choose_form(const CellLimits& limits, const BodySize& size, int n,
                                     CellMemory<Element>& memory) {
  const Choice dense{{static_cast<std::uint16_t>(n), Form::kDense, 0}, 0, limits.bytes};
  const std::uint64_t own = own_places(memory.mask);
  const int first_place = 64 * lane_id();
  const unsigned int others = __ballot_sync(~0u, own != 0) & ((1u << lane_id()) - 1);
  const int last = first_place + 63 - __clzll(static_cast<long long>(own));
  const int found = __shfl_sync(~0u, last, others ? 31 - __clz(others) : 0);
  int next = others ? found + 1 : 0;  // the place behind the one held before
  // Only a lane's first gap can be that long.
  const int gap = first_place + __ffsll(static_cast<long long>(own)) - 1 - next;
  const std::uint32_t own_skips = own ? gap / static_cast<int>(kSkip) : 0;
  std::uint32_t all;  // values in the lower half, skips in the upper
  const auto values = static_cast<std::uint32_t>(__popcll(own));
  const std::uint32_t in_front = scan_lanes(values | own_skips << 16, all);
  const std::uint32_t held = all & 0xFFFF, skips = all >> 16;
  if (n - held < limits.zeros) return dense;

  Entry entry{static_cast<std::uint16_t>(held), Form::kGaps, static_cast<std::uint8_t>(skips)};
  if ((n + 7) / 8 <= held + skips) entry = {entry.values, Form::kBitmap, 0};
  const auto bytes = static_cast<std::uint32_t>(position_bytes(entry, n));
  const Choice choice{entry, (bytes + 3) / 4 * 4, size.padded(held)};
  if (choice.bytes() >= limits.bytes) return dense;
  if (entry.form == Form::kBitmap) {
    write_before(memory, in_front & 0xFFFF);
    return choice;
  }
  __syncwarp();  // gaps are where the mask was
  std::uint16_t* places = memory.places + (in_front & 0xFFFF);
  std::uint8_t* at = memory.gaps + (in_front & 0xFFFF) + (in_front >> 16);
  for (std::uint32_t skip = 0; skip < own_skips; ++skip) {
    *at++ = static_cast<std::uint8_t>(kSkip);
    next += kSkip;
  }
  for (std::uint64_t left = own; left; left &= left - 1) {
    const int place = first_place + __ffsll(static_cast<long long>(left)) - 1;
    *places++ = static_cast<std::uint16_t>(place);
    *at++ = static_cast<std::uint8_t>(place - next);
    next = place + 1;
  }
  if (bytes + lane_id() < choice.positions) memory.gaps[bytes + lane_id()] = 0;
  __syncwarp();
  return choice;
}

}  // namespace cccl::sparse
