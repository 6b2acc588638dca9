// The header in front of every payload, and its checks. docs/FORMAT.md is the specification.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "api/buffer.h"
#include "api/dtype.h"

namespace cccl {

inline constexpr std::uint32_t kPayloadMagic = 0x504C4343;  // "CCLP", little-endian
inline constexpr std::uint8_t kPayloadVersion = 1;
inline constexpr std::size_t kPayloadAlignment = 64;
// More than memory can hold, and few enough that no size computed from it overflows.
inline constexpr std::uint64_t kMaxPayloadCount = std::uint64_t{1} << 48;

enum PayloadFlags : std::uint8_t {
  kHasChecksum = 1,
  kHasNonFinite = 2,
};

struct PayloadHeader {
  std::uint32_t magic = kPayloadMagic;
  std::uint8_t version = kPayloadVersion;
  std::uint8_t codec = 0;          // CodecInfo::id
  std::uint8_t dtype = 0;          // of the values, not of the codes
  std::uint8_t flags = 0;          // PayloadFlags
  std::uint64_t count = 0;         // values
  std::uint64_t body_bytes = 0;    // after this header
  std::uint8_t params[4] = {};     // the codec's own
  std::uint32_t origin = 0;        // 1 + first rank whose contribution was non-finite; 0: none
  std::uint64_t seed = 0;          // of a transform; 0 where there is none
  std::uint64_t statistics = 0;    // of a reduction that measures (api/noise.h); else 0
  std::uint64_t checksum = 0;      // of the body, if kHasChecksum
  std::uint64_t header_check = 0;  // over the 56 bytes before it
};
static_assert(sizeof(PayloadHeader) == 64);

// The checksum of the bytes in front of `header_check`.
constexpr std::uint64_t header_check(const PayloadHeader& header) {
  const auto words = std::bit_cast<std::array<std::uint32_t, 16>>(header);
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < 14; ++i) sum += std::uint64_t{words[i]} * (2 * i + 1);
  return sum;
}

// Position-weighted sum of 32-bit words, modulo 2^64: associative, so any number of threads may
// share it, and every change of a single word is seen. `bytes` begin at word `first` of the whole.
std::uint64_t checksum(Bytes bytes, std::uint64_t first = 0);

// Writes `header`, completed by its check value, at the payload's start.
void write_header(MutableBytes payload, PayloadHeader header);

// The same, after taking the body's checksum where that is wanted.
void seal_payload(MutableBytes payload, PayloadHeader header, bool with_checksum);

// The header in `head`, the first bytes of a payload of `bytes` in all, after all checks but that
// of the body's checksum. Throws CorruptPayloadError that names what is wrong.
PayloadHeader open_header(Bytes head, std::size_t bytes);

// The header of `payload` after all checks: magic, version, lengths, header check and, where
// present and wanted, the body's checksum. Throws CorruptPayloadError that names what is wrong.
PayloadHeader open_payload(Bytes payload, bool with_checksum = true);

// Throws CorruptPayloadError if the header has a checksum other than `found`.
void check_body(const PayloadHeader& header, std::uint64_t found);

// That a payload goes by a prediction which is not its reader's.
struct OtherPrediction {
  std::uint64_t number, position;  // of the payload's prediction, and of the payload's first value
  std::uint64_t own_number, own_count;
};
CorruptPayloadError error_of(const OtherPrediction& found);

}  // namespace cccl
