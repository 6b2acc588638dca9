#include "codecs/lossless/blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "api/error.h"
#include "devices/cpu/isa.h"

namespace cccl::lossless {
namespace {

constexpr std::size_t kRoom = kBlock + 64;  // loops go on to whole words

// The most common exponents, in order.
struct Table {
  std::uint8_t exponents[kTable] = {};
  int used = 0;
};

struct BlockKernels {
  // Of float32, float16 and bfloat16: exponents, and all that is not.
  void (*split[3])(const std::byte* in, std::size_t n, std::uint8_t* exponents, std::byte* rest);
  void (*join[3])(const std::uint8_t* exponents, const std::byte* rest, std::size_t n,
                  std::byte* out);
  bool (*contains)(const std::uint8_t* exponents, std::size_t n, std::uint8_t sought);
  void (*count)(const std::uint8_t* exponents, std::size_t n, std::size_t step,
                std::uint32_t* counts);
  std::array<std::size_t, kPlanes + 1> (*write_digits)(const std::uint8_t* exponents, std::size_t n,
                                                       const Table& table,
                                                       std::byte* const (&planes)[kPlanes],
                                                       std::byte* escapes);
  std::size_t (*count_threes)(const std::byte* plane, std::size_t digits);
  void (*read_digits)(std::byte* const (&planes)[kPlanes], const std::byte* escapes, std::size_t n,
                      const Table& table, std::uint8_t* exponents);
};

#define CCCLIB_KERNELS "codecs/lossless/kernels.inl"
#include "devices/cpu/foreach_isa.inl"

const BlockKernels& kernels() {
  static const BlockKernels all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  return pick(all);
}

int kind_of(DType dtype) { return static_cast<int>(dtype) - static_cast<int>(DType::kFloat32); }
static_assert(static_cast<int>(DType::kBFloat16) - static_cast<int>(DType::kFloat32) == 2);

// Of exponents that are equally common the lowest come first.
Table table_of(const std::uint8_t* exponents, std::size_t n, bool counts_all) {
  std::uint32_t counts[256] = {}, keys[256];
  kernels().count(exponents, n, counts_all ? 1 : kSampled, counts);
  std::size_t found = 0;
  for (std::uint32_t e = 0; e < 256; ++e)
    if (counts[e]) keys[found++] = counts[e] << 8 | (255 - e);
  Table table;
  table.used = static_cast<int>(std::min<std::size_t>(found, kTable));
  std::partial_sort(keys, keys + table.used, keys + found, std::greater<>());
  for (int k = 0; k < table.used; ++k)
    table.exponents[k] = static_cast<std::uint8_t>(255 - (keys[k] & 255));
  return table;
}

[[noreturn]] void damaged(const std::string& what) {
  throw CorruptPayloadError("lossless payload is damaged: " + what);
}

}  // namespace

Encoded encode_block(ConstValues in, bool counts_all, std::byte* out) {
  alignas(64) std::uint8_t exponents[kRoom];
  alignas(64) std::byte rest[3 * kRoom], digits[kPlanes][kBlock / 4 + 16], escapes[kBlock];
  const auto& use = kernels();
  const std::size_t n = in.count, rest_size = rest_bytes(in.dtype, n);
  const auto* values = static_cast<const std::byte*>(in.data);
  // What fills parts up to whole words.
  if (n % 32) std::memset(rest, 0, rest_size);
  use.split[kind_of(in.dtype)](values, n, exponents, rest);
  const bool non_finite = use.contains(exponents, n, top_exponent(in.dtype));
  const auto table = table_of(exponents, n, counts_all);
  std::byte* const planes[kPlanes] = {digits[0], digits[1], digits[2], digits[3]};
  const auto held = use.write_digits(exponents, n, table, planes, escapes);

  std::size_t bytes = rest_size + kTable + padded(held[kPlanes]);
  for (int p = 0; p < kPlanes; ++p) bytes += plane_bytes(held[p]);
  if (in_units(bytes) >= in.bytes()) {  // a block as long as its values is taken for them
    if (n) std::memcpy(out, values, in.bytes());
    return {in.bytes(), non_finite};
  }
  const auto append = [&](const void* from, std::size_t size) {
    std::memcpy(out, from, size);
    out += size;
  };
  append(rest, rest_size);
  append(table.exponents, kTable);
  for (int p = 0; p < kPlanes; ++p) append(planes[p], plane_bytes(held[p]));
  append(escapes, held[kPlanes]);
  std::memset(out, 0, padded(held[kPlanes]) - held[kPlanes]);
  return {bytes, non_finite};
}

void decode_block(Bytes block, bool last, Values out) {
  if (block.size() == out.bytes()) {
    if (out.count) std::memcpy(out.data, block.data(), out.bytes());
    return;
  }
  const std::size_t n = out.count, rest_size = rest_bytes(out.dtype, n);
  if (block.size() > out.bytes()) damaged("a block is longer than its values");
  if (block.size() < rest_size + kTable + plane_bytes(n)) damaged("a block is cut short");

  // A copy, so that whole words can be read to the end.
  alignas(64) std::byte coded[kBlock + 32];
  const std::size_t size = block.size() - rest_size;
  std::memcpy(coded, block.data() + rest_size, size);
  std::memset(coded + size, 0, 32);
  Table table;
  std::memcpy(table.exponents, coded, kTable);
  std::byte* planes[kPlanes];
  std::size_t at = kTable, held = n;
  for (auto& plane : planes) {
    plane = coded + at;
    at += plane_bytes(held);
    if (at > size) damaged("a block's digits go beyond it");
    held = kernels().count_threes(plane, held);
  }
  const std::size_t end = rest_size + at + padded(held);
  if (block.size() != (last ? end : in_units(end)))
    damaged("a block has " + std::to_string(block.size()) + " bytes, its digits stand for " +
            std::to_string(end));

  alignas(64) std::uint8_t exponents[kRoom];
  kernels().read_digits(planes, coded + at, n, table, exponents);
  kernels().join[kind_of(out.dtype)](exponents, block.data(), n, static_cast<std::byte*>(out.data));
}

}  // namespace cccl::lossless
