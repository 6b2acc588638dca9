#include <cstring>

#include "api/payload.h"
#include "devices/cpu/isa.h"

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
  std::uint64_t sum = sum_words(bytes.data(), words, static_cast<std::uint32_t>(first));
  if (tail) {
    std::byte last[4] = {};
    std::memcpy(last, bytes.data() + 4 * words, tail);
    sum += sum_words(last, 1, static_cast<std::uint32_t>(first + words));
  }
  return sum;
}

}  // namespace cccl
