// The kernels that decode, and add up: a warp has a cell, and finds it by the directory.
#pragma once

#include "codecs/sparse/sparse.cuh"

namespace cccl::sparse {

// Cells whose place in the body is kept: where the others are follows from their rows.
inline constexpr int kGroup = kLanes;

struct DecodeTask {
  std::byte* values;
  std::uint64_t count, cells, directory;  // values, cells, bytes
  BodySize size;
  bool aligned;                  // values, for the widest accesses
  std::uint64_t groups;          // of a payload
  const std::uint64_t* located;  // of each payload, where groups but the first begin
  const float* held;             // what another codec's kernel has decoded, of each payload
};

// A row of the directory, and the bytes of its cell, filled up to whole words.
struct Row {
  Entry entry;
  bool sound;  // a cell may have it
  std::uint32_t positions, values;

  __device__ Row(std::uint32_t word, int n, const BodySize& size)
      : entry{static_cast<std::uint16_t>(word), static_cast<Form>(word >> 16 & 255),
              static_cast<std::uint8_t>(word >> 24)} {
    const bool dense = entry.form == Form::kDense, gaps = entry.form == Form::kGaps;
    sound = (dense || gaps || entry.form == Form::kBitmap) && entry.values <= n &&
            (!dense || entry.values == n) && (gaps || !entry.skips);
    positions = sound ? (static_cast<std::uint32_t>(position_bytes(entry, n)) + 3) / 4 * 4 : 0;
    values = sound ? size.padded(entry.values) : 0;
  }
  __device__ std::uint32_t bytes() const { return positions + values; }
};

// A payload to read. `body_bytes` may be anything, but no more than there is.
struct Payload {
  WordReader in;
  std::uint64_t body_bytes;

  __device__ Payload(const Sources& sources, int i)
      : in{sources.payloads[i] + sizeof(PayloadHeader),
           reinterpret_cast<std::uintptr_t>(sources.payloads[i]) % 4 == 0},
        body_bytes(min(read_header(sources.payloads[i]).body_bytes, sources.expected.body_bytes)) {}
};

struct LocateTask {
  std::uint64_t count, cells, groups, turns, directory;
  BodySize size;
  unsigned int* next;         // of each payload
  unsigned long long* known;  // of each payload and turn
  std::uint64_t* located;     // as in DecodeTask
  Cell* places;               // of each payload and cell, or null
};

// Finds the groups of payload blockIdx.y. Cells that are not in the body, or have no sound row,
// hold nothing: the kernel that reads them reports it.
static __global__ void __launch_bounds__(kThreads)
    locate_cells(__grid_constant__ const LocateTask task, __grid_constant__ const Sources sources) {
  __shared__ Turns::Shared shared;
  begin();
  const Payload payload(sources, static_cast<int>(blockIdx.y));
  const bool has_rows = task.directory <= payload.body_bytes;
  const Turns turns{task.next + blockIdx.y, task.known + blockIdx.y * task.turns};
  for (std::uint64_t turn = turns.begin(shared); turn < task.turns; turn = shared.taken) {
    const std::uint64_t group = turn * kWarps + threadIdx.x / kLanes;
    const std::uint64_t cell = group * kGroup + lane_id();
    const bool mine = has_rows && cell < task.cells;
    std::uint64_t unused = 0;
    const Row row(mine ? payload.in.word(sizeof(Entry) * cell, unused) : 0,
                  mine ? values_in(cell, task.count) : 0, task.size);
    std::uint32_t all;
    const std::uint32_t in_front = scan_lanes(row.bytes(), all);
    const std::uint64_t at = task.directory + 4 * turns.place(turn, all / 4, shared).begin;
    if (lane_id() == 0 && group < task.groups) task.located[blockIdx.y * task.groups + group] = at;
    if (task.places && cell < task.cells) {
      const std::uint64_t from = at + in_front + row.positions;
      const bool readable = row.sound && from + row.values <= payload.body_bytes;
      task.places[blockIdx.y * task.cells + cell] = {from, readable ? row.entry.values : 0u, 0};
    }
  }
}

// Whether the places of a bitmap are as many as the cell has values, and none beyond its n.
template <class Element>
__device__ inline bool read_bitmap(const Payload& payload, std::uint64_t at, const Row& row, int n,
                                   CellMemory<Element>& memory, std::uint64_t& sum) {
  const auto low_bits = [](int bits) {
    return bits <= 0 ? 0 : bits >= 32 ? ~0u : (1u << bits) - 1;
  };
  std::uint32_t found = 0;
  bool sound = true;
#pragma unroll
  for (int i = lane_id(); i < kMaskWords; i += kLanes) {
    std::uint32_t word = 4 * i < row.positions ? payload.in.word(at + 4 * i, sum) : 0;
    word &= low_bits((n + 7) / 8 * 8 - 32 * i);  // what fills up to a whole word is no matter
    sound &= (word & ~low_bits(n - 32 * i)) == 0;
    found += __popc(word);
    memory.mask[i] = word;
  }
  return __all_sync(~0u, sound) && __reduce_add_sync(~0u, found) == row.entry.values;
}

// The same of gaps. Places only grow: if the last is inside the cell, all are.
template <class Element>
__device__ inline bool read_gaps(const Payload& payload, std::uint64_t at, const Row& row, int n,
                                 CellMemory<Element>& memory, std::uint64_t& sum) {
  memory.mask[lane_id()] = memory.mask[kLanes + lane_id()] = 0;
  __syncwarp();
  const int bytes = static_cast<int>(position_bytes(row.entry, n));
  std::uint32_t end = 0, found = 0;  // behind the last place, and values
  for (std::uint32_t first = 0; first < row.positions; first += 4 * kLanes) {
    const std::uint32_t mine = first + 4 * lane_id();
    const std::uint32_t word = mine < row.positions ? payload.in.word(at + mine, sum) : 0;
    std::uint32_t steps[4], own = 0;  // values in the upper half of `own`
    bool is_value[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const std::uint32_t gap = word >> 8 * b & 255;
      const bool valid = static_cast<int>(mine) + b < bytes;
      is_value[b] = valid && gap != kSkip;
      steps[b] = valid ? gap + is_value[b] : 0;
      own += steps[b] | static_cast<std::uint32_t>(is_value[b]) << 16;
    }
    std::uint32_t all;
    std::uint32_t behind = end + (scan_lanes(own, all) & 0xFFFF);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      behind += steps[b];
      const std::uint32_t place = behind - 1;
      if (is_value[b] && place < static_cast<std::uint32_t>(n))
        atomicOr(&memory.mask[place / 32], 1u << place % 32);
    }
    end += all & 0xFFFF;
    found += all >> 16;
  }
  return end <= static_cast<std::uint32_t>(n) && found == row.entry.values;
}

// A cell of a payload as this warp has it in memory.
struct Opened {
  bool sound, dense;
};

// kHeld: its values are in task.held, as floats.
template <class Element, bool kHeld>
__device__ inline Opened open_cell(const DecodeTask& task, const Payload& payload, int number,
                                   std::uint64_t cell, CellMemory<Element>& memory,
                                   std::uint64_t& sum) {
  if (task.directory > payload.body_bytes) return {false, false};
  const std::uint64_t group = cell / kGroup, first = group * kGroup;
  const int own = static_cast<int>(cell % kGroup);
  const bool exists = first + lane_id() < task.cells;
  std::uint64_t of_row = 0;
  const std::uint32_t word =
      exists ? payload.in.word(sizeof(Entry) * (first + lane_id()), of_row) : 0;
  if (lane_id() == own) sum += of_row;
  const Row mine(word, exists ? values_in(first + lane_id(), task.count) : 0, task.size);
  const std::uint64_t begin =
      (group ? task.located[number * task.groups + group] : task.directory) +
      __reduce_add_sync(~0u, lane_id() < own ? mine.bytes() : 0);
  const int n = values_in(cell, task.count);
  const Row row(__shfl_sync(~0u, word, own), n, task.size);
  const std::uint64_t end = begin + row.bytes();
  const bool whole = cell + 1 < task.cells || end == payload.body_bytes;
  const bool inside = begin >= task.directory && end >= begin && end <= payload.body_bytes;
  if (!row.sound || !inside || !whole) return {false, false};

  __syncwarp();  // what was in memory has been read
  bool sound = true;
  if (row.entry.form == Form::kBitmap) sound = read_bitmap(payload, begin, row, n, memory, sum);
  if (row.entry.form == Form::kGaps) sound = read_gaps(payload, begin, row, n, memory, sum);
  const std::uint64_t values = begin + row.positions;
  auto* const words = reinterpret_cast<std::uint32_t*>(memory.elements);
  for (std::uint32_t i = lane_id(); i < row.values / 4; i += kLanes) {
    const std::uint32_t found = payload.in.word(values + 4 * i, sum);
    if (!kHeld) words[i] = found;
  }
  if constexpr (kHeld) {
    const float* const held = task.held + (number * task.cells + cell) * kCellSize;
    for (std::uint32_t i = lane_id(); i < row.entry.values; i += kLanes)
      words[i] = __float_as_uint(held[i]);
  }
  __syncwarp();
  const bool dense = row.entry.form == Form::kDense;
  if (!dense) {
    std::uint32_t all;
    write_before(memory,
                 scan_lanes(static_cast<std::uint32_t>(__popcll(own_places(memory.mask))), all));
  }
  return {sound, dense};
}

// A lane's elements of a row of kVector, zeros where none is held.
template <int kVector, class Element>
__device__ inline auto elements_at(const CellMemory<Element>& memory, bool dense, int row) {
  using Word = WordOf<Element>;
  Chunk<kVector * sizeof(Element)> chunk{};
  if (dense) {
    const auto* const from = memory.elements + row * kLanes * kVector;
    return read_chunk<kVector * sizeof(Element)>(reinterpret_cast<const std::byte*>(from));
  }
  auto [bits, rank] = held_from(memory, (row * kLanes + lane_id()) * kVector);
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const bool held = bits >> v & 1;
    const Word word = held ? memory.elements[rank] : Word{0};
    rank += held;
    if constexpr (sizeof(Word) == 8) {
      chunk.words[2 * v] = static_cast<std::uint32_t>(word);
      chunk.words[2 * v + 1] = static_cast<std::uint32_t>(word >> 32);
    } else {
      chunk.words[v * sizeof(Word) / 4] |= static_cast<std::uint32_t>(word)
                                           << 8 * (v * sizeof(Word) % 4);
    }
  }
  return chunk;
}

// Writes rows of a cell: of(row) gives a lane's.
template <class Out, int kUnroll, class Element, class Of>
__device__ inline void write_rows(const DecodeTask& task, std::uint64_t cell,
                                  CellMemory<Element>& memory, Of of) {
  constexpr int kRow = kLanes * kChunkBytes;
  constexpr int kRows = kCellSize * static_cast<int>(sizeof(Out)) / kRow;
  const int n = values_in(cell, task.count);
  std::byte* const to = task.values + cell * kCellSize * sizeof(Out);
  if (task.aligned && n == kCellSize) {
#pragma unroll kUnroll
    for (int row = 0; row < kRows; ++row)
      write_chunk<true>(to + row * kRow, Chunk<kChunkBytes>(of(row)), lane_id());
    return;
  }
  const WarpTile<false> tile{0, 0, 0, 0, n, memory.staging};
#pragma unroll kUnroll
  for (int row = 0; row < kRows; ++row) {
    const auto left = static_cast<std::int64_t>(n) * sizeof(Out) - row * kRow;
    write_row(tile, to + row * kRow, left, Chunk<kChunkBytes>(of(row)), lane_id());
  }
}

// step(cell, this warp's memory) for each cell of this warp.
template <class Element, class Step>
__device__ inline void for_cells_of_warp(std::uint64_t cells, Step step) {
  constexpr int kOfBlock = kCellsOfBlock<Element>;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (warp >= kOfBlock) return;
  for (std::uint64_t cell = std::uint64_t{blockIdx.x} * kOfBlock + warp; cell < cells;
       cell += std::uint64_t{gridDim.x} * kOfBlock)
    step(cell, memory_of_warp<Element>(warp));
}

__device__ inline void report_damage(Report* report, int number, Totals& totals) {
  totals.flags |= kReported;
  if (lane_id() == 0) report->damaged = number + 1;
}

// kHeld: elements are floats that become values of type Out, else the very values.
template <class Element, class Out, bool kHeld>
__global__ void __launch_bounds__(kThreads, sizeof(Element) == 8 ? 2 : 3)
    decode_sparse(__grid_constant__ const DecodeTask task, __grid_constant__ const Sources sources,
                  Workspace* workspace, Report* report) {
  constexpr int kVector = kChunkBytes / sizeof(Out);
  begin();
  Totals totals = inspect(sources, report);
  const Payload payload(sources, 0);
  for_cells_of_warp<Element>(task.cells, [&](std::uint64_t cell, CellMemory<Element>& memory) {
    const auto opened = open_cell<Element, kHeld>(task, payload, 0, cell, memory, totals.read);
    if (!opened.sound) return report_damage(report, 0, totals);
    write_rows<Out, 4>(task, cell, memory, [&](int row) {
      const auto elements = elements_at<kVector>(memory, opened.dense, row);
      if constexpr (kHeld) {
        SumOf<Out> values[kVector];
        load<float, true, SumOf<Out>, kVector>(elements, values);
        return store<Out, true, kVector>(values);
      } else {
        return elements;
      }
    });
  });
  finish(workspace, totals, report, nullptr);
}

// Sums of all sources, which begin with -0: it leaves a first term as it is.
template <class Element, class Out, bool kHeld>
__global__ void __launch_bounds__(kThreads, sizeof(Out) == 8 ? 1 : 2)
    sum_sparse(__grid_constant__ const DecodeTask task, Mean mean,
               __grid_constant__ const Sources sources, Workspace* workspace, Report* report) {
  constexpr int kVector = kChunkBytes / sizeof(Out), kRows = kCellSize / kLanes / kVector;
  using Real = SumOf<Out>;
  begin();
  Totals totals = inspect(sources, report);
  for_cells_of_warp<Element>(task.cells, [&](std::uint64_t cell, CellMemory<Element>& memory) {
    Real sums[kRows * kVector / kPerLane][kPerLane];
#pragma unroll
    for (auto& part : sums)
#pragma unroll
      for (Real& sum : part) sum = Real{-0.0f};
#pragma unroll 1
    for (int i = 0; i < sources.count; ++i) {
      const auto opened =
          open_cell<Element, kHeld>(task, Payload(sources, i), i, cell, memory, totals.read);
      if (!opened.sound) {
        report_damage(report, i, totals);
        continue;
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        Real terms[kVector];
        load<Element, true, Real, kVector>(elements_at<kVector>(memory, opened.dense, row), terms);
#pragma unroll
        for (int v = 0; v < kVector; ++v)
          sums[row * kVector / kPerLane][row * kVector % kPerLane + v] += terms[v];
      }
    }
#pragma unroll
    for (auto& part : sums) {
      divide(mean, part);
      if (mean.half_overflows) overflow_half(part);
      unite_nans(part);
    }
    write_rows<Out, kRows>(task, cell, memory, [&](int row) {
      return store<Out, false, kVector>(sums[row * kVector / kPerLane] + row * kVector % kPerLane);
    });
  });
  finish(workspace, totals, report, nullptr);
}

}  // namespace cccl::sparse
