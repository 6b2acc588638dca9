#include <atomic>
#include <cstring>

#include "api/payload.h"
#include "devices/cpu/isa.h"
#include "devices/cpu/workers.h"

namespace cccl {
namespace {

using SumWords = std::uint64_t (*)(const std::byte*, std::size_t, std::uint32_t);

#define CCCLIB_KERNELS "devices/cpu/checksum_kernels.inl"
#include "devices/cpu/foreach_isa.inl"

}  // namespace

std::uint64_t checksum(Bytes bytes, std::uint64_t first) {
  static const SumWords all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  const std::size_t words = bytes.size() / 4, tail = bytes.size() % 4;
  const auto sum_words = pick(all);
  const auto sum_from = [&](std::size_t word, std::size_t count) {
    return sum_words(bytes.data() + 4 * word, count, static_cast<std::uint32_t>(first + word));
  };
  const auto pieces = pieces_of(words, 1, 4);
  std::uint64_t sum = 0;
  if (pieces.size() == 1) {
    sum = sum_from(0, words);
  } else {
    std::atomic<std::uint64_t> total{0};
    for_each_piece(pieces, [&](std::size_t piece) {
      total += sum_from(pieces.begin(piece), pieces.end(piece) - pieces.begin(piece));
    });
    sum = total;
  }
  if (tail) {
    std::byte last[4] = {};
    std::memcpy(last, bytes.data() + 4 * words, tail);
    sum += sum_words(last, 1, static_cast<std::uint32_t>(first + words));
  }
  return sum;
}

}  // namespace cccl
