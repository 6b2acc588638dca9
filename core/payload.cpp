#include "api/payload.h"

#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

namespace cccl {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

namespace {

std::string hex(std::uint64_t value) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

std::uint64_t checksum(Bytes bytes) {
  std::uint64_t sum = 0;
  const std::size_t words = bytes.size() / 4;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint32_t word;
    std::memcpy(&word, bytes.data() + 4 * i, 4);
    sum += std::uint64_t{word} * static_cast<std::uint32_t>(2 * i + 1);
  }
  if (const std::size_t tail = bytes.size() % 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + 4 * words, tail);
    sum += std::uint64_t{word} * static_cast<std::uint32_t>(2 * words + 1);
  }
  return sum;
}

void seal_payload(MutableBytes payload, PayloadHeader header, bool with_checksum) {
  if (with_checksum) {
    header.flags |= kHasChecksum;
    header.checksum = checksum(payload.subspan(sizeof header, header.body_bytes));
  }
  header.header_check = header_check(header);
  std::memcpy(payload.data(), &header, sizeof header);
}

PayloadHeader open_header(Bytes head, std::size_t bytes) {
  PayloadHeader header;
  if (head.size() < sizeof header || bytes < sizeof header)
    throw CorruptPayloadError("payload truncated: " + std::to_string(bytes) +
                              " bytes, the header alone has 64");
  std::memcpy(&header, head.data(), sizeof header);
  if (header.magic != kPayloadMagic)
    throw CorruptPayloadError("not a CCCL payload: it begins with " + hex(header.magic) +
                              " instead of " + hex(kPayloadMagic));
  if (header.version != kPayloadVersion)
    throw CorruptPayloadError("payload has format version " + std::to_string(header.version) +
                              ", this library reads version " + std::to_string(kPayloadVersion));
  if (header.header_check != header_check(header))
    throw CorruptPayloadError("payload header is damaged: its check value does not match");
  if (!is_dtype(header.dtype))
    throw CorruptPayloadError("payload has unknown dtype number " + std::to_string(header.dtype));
  if (header.count > kMaxPayloadCount)
    throw CorruptPayloadError("payload header announces an impossible " +
                              std::to_string(header.count) + " values");
  if (bytes - sizeof header < header.body_bytes)
    throw CorruptPayloadError("payload truncated: " + std::to_string(bytes) +
                              " bytes, its header announces " + std::to_string(sizeof header) +
                              " + " + std::to_string(header.body_bytes));
  return header;
}

PayloadHeader open_payload(Bytes payload) {
  const auto header = open_header(payload, payload.size());
  if ((header.flags & kHasChecksum) &&
      header.checksum != checksum(payload.subspan(sizeof header, header.body_bytes)))
    throw CorruptPayloadError("payload body is damaged: its checksum does not match");
  return header;
}

}  // namespace cccl
