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

void write_header(MutableBytes payload, PayloadHeader header) {
  header.header_check = header_check(header);
  std::memcpy(payload.data(), &header, sizeof header);
}

void seal_payload(MutableBytes payload, PayloadHeader header, bool with_checksum) {
  if (with_checksum) {
    header.flags |= kHasChecksum;
    header.checksum = checksum(payload.subspan(sizeof header, header.body_bytes));
  }
  write_header(payload, header);
}

void check_body(const PayloadHeader& header, std::uint64_t found) {
  if ((header.flags & kHasChecksum) && header.checksum != found)
    throw CorruptPayloadError("payload body is damaged: its checksum does not match");
}

CorruptPayloadError error_of(const OtherPrediction& found) {
  return CorruptPayloadError(
      "a diff payload goes by prediction number " + std::to_string(found.number) +
      " of the values from " + std::to_string(found.position) + " on, and here is number " +
      std::to_string(found.own_number) + " of " + std::to_string(found.own_count) +
      " values: reset state on all ranks or on none");
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

PayloadHeader open_payload(Bytes payload, bool with_checksum) {
  const auto header = open_header(payload, payload.size());
  if (with_checksum && (header.flags & kHasChecksum))
    check_body(header, checksum(payload.subspan(sizeof header, header.body_bytes)));
  return header;
}

}  // namespace cccl
