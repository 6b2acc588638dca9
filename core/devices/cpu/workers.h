// Threads that share the work of one call. How many there are changes no byte.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

namespace cccl {

// As many as CCCL_CODEC_THREADS says (a number, or "auto": the cores that this process may use,
// less one for its own work, shared with the other ranks of the host; at most 8). The calling
// thread is one of them. Throws ConfigError for anything else there.
std::size_t codec_threads();
void set_codec_threads(std::size_t threads);  // 0: auto, whatever the environment says

// `count` items in equal pieces, but for the last, which begin at multiples of a unit.
struct Pieces {
  std::size_t count, length;

  static Pieces one(std::size_t count) { return {count, std::max<std::size_t>(1, count)}; }
  std::size_t size() const { return std::max<std::size_t>(1, (count + length - 1) / length); }
  std::size_t of(std::size_t item) const { return item / length; }
  std::size_t begin(std::size_t piece) const { return piece * length; }
  std::size_t end(std::size_t piece) const { return std::min(count, begin(piece) + length); }
};

// So many that threads which come late delay little. One, where waking others would take longer
// than `count` items of `bytes` each do.
Pieces pieces_of(std::size_t count, std::size_t unit, std::size_t bytes);

// work(piece) for each piece, in any order, on any of the threads; all are done when it returns.
// Rethrows the error of the first piece that has one. On the calling thread alone where the others
// are busy with another call, or stayed behind in a fork.
void for_each_piece(const Pieces& pieces, const std::function<void(std::size_t piece)>& work);

}  // namespace cccl
