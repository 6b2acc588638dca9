// The kernel that encodes: a warp has a cell, a thread block takes as many as it has room for, one
// turn after the other.
#pragma once

#include "codecs/sparse/select.cuh"

namespace cccl::sparse {

// Memory of one encode, zero at first.
struct Control {
  Begun begun;
  unsigned int next;  // turn to be taken
};

struct EncodeTask {
  const std::byte* values;
  std::uint64_t count, cells, turns, directory;  // values, cells, turns, bytes
  CellLimits whole, last;                        // of whole cells, and of the last
  Selection selection;
  Exponents exponents;  // of elements, all set in an Inf or NaN
  BodySize size;
  bool aligned;  // values, for the widest accesses
  Control* control;
  unsigned long long* known;  // of each turn
  // Where another codec's kernel writes the values: what it then needs.
  float* held;
  Cell* places;
  std::uint32_t infinity;  // the least float that it takes for an Inf without telling
};

// What a row of source values in a lane is as elements.
template <class Source, class Element, int kBytes>
__device__ inline auto elements_of(const Chunk<kBytes>& row) {
  if constexpr (std::is_same_v<Source, Element>) {
    return row;
  } else {
    constexpr int kVector = kBytes / sizeof(Source);
    float values[kVector];
    load<Source, true, float, kVector>(row, values);
    return store<Element, false, kVector>(values);
  }
}

// Elements and mask of a cell.
template <class Source, class Element>
__device__ inline void load_cell(const EncodeTask& task, std::uint64_t index, int n,
                                 CellMemory<Element>& memory) {
  constexpr int kVector = kChunkBytes / sizeof(Source), kRow = kLanes * kVector;
  constexpr int kRows = kCellSize / kRow, kBatch = kRows < 8 ? kRows : 8;
  using Word = WordOf<Element>;
  const std::byte* const from = task.values + index * kCellSize * sizeof(Source);
  const auto take = [&](int row, const Chunk<kChunkBytes>& chunk) {
    const auto elements = elements_of<Source, Element>(chunk);
    auto* const to = reinterpret_cast<std::byte*>(memory.elements + row * kRow);
    write_chunk<false>(to, elements, lane_id());
    write_flags<kVector>(memory.mask, row,
                         flags_of<Word>(elements, static_cast<Word>(task.selection.bits),
                                        static_cast<Word>(task.selection.least)));
  };
  if (task.aligned && n == kCellSize) {
    for (int first = 0; first < kRows; first += kBatch) {
      Chunk<kChunkBytes> rows[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        rows[k] = read_chunk<kChunkBytes>(from + (first + k) * kRow * sizeof(Source));
#pragma unroll
      for (int k = 0; k < kBatch; ++k) take(first + k, rows[k]);
    }
  } else {
    const WarpTile<false> tile{0, 0, 0, 0, n, memory.staging};
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      const auto valid = static_cast<std::int64_t>(n - row * kRow) * sizeof(Source);
      take(row, read_row<kChunkBytes>(tile, from + row * kRow * sizeof(Source), valid));
    }
  }
  __syncwarp();
}

// The elements held, side by side, where a bitmap says which.
template <class Element>
__device__ inline void compact(std::uint32_t held, int n, CellMemory<Element>& memory) {
  constexpr int kVector = kChunkBytes / sizeof(Element), kRow = kLanes * kVector;
  constexpr int kRows = kCellSize / kRow, kBatch = kRows < 4 ? kRows : 4;
  using Word = WordOf<Element>;
  for (int first = 0; first < kRows && first * kRow < n; first += kBatch) {
    Chunk<kChunkBytes> rows[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      rows[k] = read_chunk<kChunkBytes>(
          reinterpret_cast<const std::byte*>(memory.elements + (first + k) * kRow));
    __syncwarp();  // they go to where they came from, or in front of that
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      auto [bits, rank] = held_from(memory, ((first + k) * kLanes + lane_id()) * kVector);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        if (bits >> v & 1) memory.elements[rank++] = word_at<Word>(rows[k], v);
    }
  }
  __syncwarp();
  constexpr int kInWord = sizeof(Element) < 4 ? 4 / sizeof(Element) : 1;
  if (lane_id() < (kInWord - held % kInWord) % kInWord) memory.elements[held + lane_id()] = 0;
  __syncwarp();
}

// Element i of those held.
template <class Element>
__device__ inline WordOf<Element> held_element(const Choice& choice, std::uint32_t i,
                                               const CellMemory<Element>& memory) {
  return memory.elements[choice.entry.form == Form::kGaps ? memory.places[i] : i];
}

// Of the 32-bit words that they fill, word i.
template <class Element>
__device__ inline std::uint32_t held_word(const Choice& choice, std::uint32_t i,
                                          const CellMemory<Element>& memory) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(memory.elements);
  if (choice.entry.form != Form::kGaps) return words[i];
  if constexpr (sizeof(Element) >= 4) {
    constexpr int kOfElement = sizeof(Element) / 4;
    return words[memory.places[i / kOfElement] * kOfElement + i % kOfElement];
  } else {
    constexpr int kInWord = 4 / sizeof(Element);
    std::uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < kInWord; ++e) {
      const std::uint32_t element = i * kInWord + e;
      if (element < choice.entry.values)
        word |= std::uint32_t{memory.elements[memory.places[element]]}
                << 8 * static_cast<int>(sizeof(Element)) * e;
    }
    return word;
  }
}

// As floats for another codec's kernel. Returns whether one is as good as an Inf.
template <class Element>
__device__ inline bool hold(const EncodeTask& task, std::uint64_t index, const Choice& choice,
                            const CellMemory<Element>& memory) {
  bool found = false;
  for (std::uint32_t i = lane_id(); i < choice.entry.values; i += kLanes) {
    const auto element = held_element(choice, i, memory);
    float value;
    if constexpr (sizeof(Element) == 8)
      value = narrow(__longlong_as_double(static_cast<long long>(element)));
    else
      value = __uint_as_float(element);
    found |= (__float_as_uint(value) & 0x7FFFFFFFu) >= task.infinity;
    task.held[index * kCellSize + i] = value;
  }
  return found;
}

// kHeld: another codec's kernel writes the values, and completes the payload.
template <class Source, class Element, bool kHeld>
__global__ void __launch_bounds__(kThreads, sizeof(Element) == 8 ? 2 : 3)
    encode_sparse(__grid_constant__ const EncodeTask task, __grid_constant__ const Seal seal,
                  __grid_constant__ const Sources sources, Workspace* workspace) {
  __shared__ Turns::Shared shared;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  auto& memory = memory_of_warp<Element>(warp);
  begin();
  Totals totals{};
  if (!kHeld) totals = inspect(sources, nullptr);  // for their flags: sums are encoded here
  std::byte* const body = seal.payload + sizeof(PayloadHeader);
  const WordWriter out{body, reinterpret_cast<std::uintptr_t>(body) % 4 == 0};
  const Turns turns{&task.control->next, task.known};
  for (std::uint64_t turn = turns.begin(shared); turn < task.turns; turn = shared.taken) {
    const std::uint64_t index = turn * kCellsOfBlock<Element> + warp;
    const bool mine = warp < kCellsOfBlock<Element> && index < task.cells;
    Choice choice{};
    if (mine) {
      const int n = values_in(index, task.count);
      const CellLimits& limits = n == kCellSize ? task.whole : task.last;
      load_cell<Source, Element>(task, index, n, memory);
      if (task.selection.top_k) keep_largest(task.selection, limits.kept, memory);
      choice = choose_form(limits, task.size, n, memory);
      if (choice.entry.form == Form::kBitmap) compact(choice.entry.values, n, memory);
      if constexpr (kHeld)
        if (hold(task, index, choice, memory)) totals.flags |= kFoundNonFinite;
    }
    const auto [begin, end] = turns.place(turn, choice.bytes() / 4, shared);
    if (turn == task.turns - 1 && threadIdx.x == 0)
      task.control->begun.body_bytes = task.directory + 4 * end;
    if (!mine) continue;
    const std::uint64_t at = task.directory + 4 * begin;
    if (lane_id() == 0) {
      const auto [values, form, skips] = choice.entry;
      const auto row =
          values | static_cast<std::uint32_t>(form) << 16 | static_cast<std::uint32_t>(skips) << 24;
      out.word(sizeof(Entry) * index, row, totals.written);
      if constexpr (kHeld) task.places[index] = {at + choice.positions, values, 0};
    }
    for (std::uint32_t i = lane_id(); i < choice.positions / 4; i += kLanes)
      out.word(at + 4 * i, memory.mask[i], totals.written);  // or gaps
    if constexpr (!kHeld) {
      for (std::uint32_t i = lane_id(); i < choice.values / 4; i += kLanes) {
        const std::uint32_t word = held_word(choice, i, memory);
        if (has_non_finite(word, i, task.exponents)) totals.flags |= kFoundNonFinite;
        out.word(at + choice.positions + 4 * i, word, totals.written);
      }
    }
    __syncwarp();  // before the memory is used for the next
  }
  if constexpr (kHeld) {
    const Totals block = sum_of_block(totals);
    if (threadIdx.x == 0) {
      atomicAdd(&task.control->begun.written, block.written);
      atomicOr(&task.control->begun.flags, block.flags);
    }
  } else {
    finish(workspace, totals, nullptr, &seal, &task.control->begun.body_bytes);
  }
}

}  // namespace cccl::sparse
