#include "codecs/sparse/cells.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "devices/cpu/isa.h"

namespace cccl::sparse {
namespace {

struct CellKernels {
  WordKernels words[4];
  std::size_t (*places_of)(const std::uint64_t* mask, std::size_t words, std::uint16_t* places);
};

#define CCCLIB_KERNELS "codecs/sparse/kernels.inl"
#include "devices/cpu/foreach_isa.inl"

const CellKernels& kernels() {
  static const CellKernels all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  return pick(all);
}

std::size_t bits_in(const std::uint64_t* mask, std::size_t n) {
  std::size_t found = 0;
  for (std::size_t w = 0; w < mask_words(n); ++w) found += std::popcount(mask[w]);
  return found;
}

[[noreturn]] void damaged(const std::string& what) {
  throw CorruptPayloadError("sparse payload is damaged: " + what);
}

}  // namespace

const WordKernels& kernels_for(std::size_t size) { return kernels().words[std::countr_zero(size)]; }

void select_elements(const std::byte* elements, std::size_t n, std::size_t size,
                     std::uint64_t* mask) {
  kernels_for(size).select(elements, n, ~std::uint64_t{0}, 1, mask);
}

template <class Real>
void select_values(const Settings& settings, const Real* values, std::size_t n,
                   std::uint64_t* mask) {
  const auto& words = kernels_for(sizeof(Real));
  const auto* elements = bytes_of(values);
  const auto at_least = [&](std::uint64_t least) {
    words.select(elements, n, kMagnitude<Real>, least, mask);
  };
  if (settings.threshold > 0) {
    const auto least = std::bit_cast<Bits<Real>>(static_cast<Real>(settings.threshold));
    return at_least(std::max<std::uint64_t>(least, 1));
  }
  const auto k = static_cast<std::size_t>(std::ceil(settings.top_k * static_cast<double>(n)));
  if (k == 0 || words.count(elements, n, kMagnitude<Real>, 1) <= k) return at_least(1);
  // The k-th largest magnitude, bit by bit from the top.
  std::uint64_t kth = 0;
  for (int bit = 8 * static_cast<int>(sizeof(Real)) - 2; bit >= 0; --bit) {
    const std::uint64_t higher = kth | std::uint64_t{1} << bit;
    if (words.count(elements, n, kMagnitude<Real>, higher) >= k) kth = higher;
  }
  constexpr std::uint64_t kInfinity =
      std::bit_cast<Bits<Real>>(std::numeric_limits<Real>::infinity());
  if (kth >= kInfinity) return at_least(kInfinity);
  at_least(kth);
  // Of equals the last ones go.
  std::size_t surplus = bits_in(mask, n) - k;
  for (std::size_t i = n; surplus > 0 && i-- > 0;) {
    if ((std::bit_cast<Bits<Real>>(values[i]) & kMagnitude<Real>) != kth) continue;
    mask[i / 64] &= ~(std::uint64_t{1} << i % 64);
    --surplus;
  }
}

template void select_values(const Settings&, const float*, std::size_t, std::uint64_t*);
template void select_values(const Settings&, const double*, std::size_t, std::uint64_t*);

void choose_form(const Settings& settings, const TileCodec& inner, DType dtype, std::size_t n,
                 Places& places) {
  const std::size_t held = bits_in(places.mask, n);
  places.entry = {static_cast<std::uint16_t>(n), Form::kDense, 0};
  if (static_cast<double>(n - held) <= settings.sparsity * static_cast<double>(n)) return;
  kernels().places_of(places.mask, mask_words(n), places.at);
  std::size_t skips = 0, next = 0;
  for (std::size_t i = 0; i < held; ++i) {
    skips += (places.at[i] - next) / kSkip;
    next = places.at[i] + std::size_t{1};
  }
  Entry sparse{static_cast<std::uint16_t>(held), Form::kGaps, static_cast<std::uint8_t>(skips)};
  if ((n + 7) / 8 <= held + skips) sparse = {sparse.values, Form::kBitmap, 0};
  const auto predicted = padded(position_bytes(sparse, n)) + padded(inner.body_bytes(held, dtype));
  if (predicted < padded(inner.body_bytes(n, dtype))) places.entry = sparse;
}

std::byte* write_positions(const Places& places, std::size_t n, std::byte* at) {
  const std::size_t bytes = position_bytes(places.entry, n);
  std::byte* const end = at + padded(bytes);
  if (places.entry.form == Form::kBitmap) {
    std::memcpy(at, places.mask, bytes);
    at += bytes;
  } else if (places.entry.form == Form::kGaps) {
    std::size_t next = 0;
    for (std::size_t i = 0; i < places.entry.values; ++i) {
      std::size_t gap = places.at[i] - next;
      for (; gap >= kSkip; gap -= kSkip) *at++ = std::byte{kSkip};
      *at++ = static_cast<std::byte>(gap);
      next = places.at[i] + std::size_t{1};
    }
  }
  std::fill(at, end, std::byte{0});
  return end;
}

std::size_t bytes_of_cells(const std::byte* directory, const TileCodec& inner, DType dtype,
                           std::size_t count) {
  std::size_t bytes = 0;
  for (std::size_t first = 0; first < count; first += kCell, directory += sizeof(Entry)) {
    const std::size_t n = std::min(kCell, count - first);
    Entry entry;
    std::memcpy(&entry, directory, sizeof entry);
    const bool gaps = entry.form == Form::kGaps, dense = entry.form == Form::kDense;
    if (!(gaps || dense || entry.form == Form::kBitmap) || entry.values > n ||
        (dense && entry.values != n) || (!gaps && entry.skips))
      damaged("row " + std::to_string(first / kCell) + " of its directory is impossible");
    bytes += padded(position_bytes(entry, n)) + padded(inner.body_bytes(entry.values, dtype));
  }
  return bytes;
}

CellReader::CellReader(Bytes payload, const TileCodec& inner, DType dtype, std::size_t count)
    : inner_(&inner),
      dtype_(dtype),
      count_(count),
      directory_(payload.data() + sizeof(PayloadHeader)),
      next_(directory_ + sizeof(Entry) * cells_of(count)) {}

void CellReader::advance() {
  first_ = next_first_;
  n_ = std::min(kCell, count_ - first_);
  next_first_ += n_;
  std::memcpy(&places_.entry, directory_ + sizeof(Entry) * (first_ / kCell), sizeof(Entry));
  const auto* positions = next_;
  values_ = positions + padded(position_bytes(places_.entry, n_));
  next_ = values_ + padded(inner_->body_bytes(places_.entry.values, dtype_));
  if (places_.entry.form == Form::kBitmap) read_bitmap(positions);
  if (places_.entry.form == Form::kGaps) read_gaps(positions);
}

void CellReader::read_bitmap(const std::byte* positions) {
  auto& last = places_.mask[mask_words(n_) - 1];
  last = 0;
  std::memcpy(places_.mask, positions, (n_ + 7) / 8);
  if (n_ % 64 && last >> n_ % 64) damaged("a bitmap goes beyond its cell");
  if (bits_in(places_.mask, n_) != held())
    damaged("a bitmap has another number of bits than its cell has values");
  kernels().places_of(places_.mask, mask_words(n_), places_.at);
}

// Places only grow: if the last is inside the cell, all are.
void CellReader::read_gaps(const std::byte* positions) {
  const std::size_t bytes = position_bytes(places_.entry, n_);
  std::size_t end = 0, found = 0;
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto gap = static_cast<std::size_t>(positions[i]);
    const std::size_t is_value = gap != kSkip;
    end += gap + is_value;
    places_.at[found] = static_cast<std::uint16_t>(end - 1);
    found += is_value;
  }
  if (end > n_) damaged("a value lies beyond its cell");
  if (found != held()) damaged("a cell has fewer places than values");
}

}  // namespace cccl::sparse
