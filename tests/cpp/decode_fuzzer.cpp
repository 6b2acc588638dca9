// libFuzzer's entry. The check values are made good first, or no input would get past them.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hostile.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cccl;
  std::vector<std::byte> payload(size);
  if (size) std::memcpy(payload.data(), data, size);
  testing::decode_hostile(payload);
  PayloadHeader header;
  if (size < sizeof header) return 0;
  std::memcpy(&header, data, sizeof header);
  header.magic = kPayloadMagic;
  header.version = kPayloadVersion;
  const bool whole = header.body_bytes <= size - sizeof header;
  if (!whole) header.flags &= ~kHasChecksum;
  seal_payload(payload, header, whole && header.flags & kHasChecksum);
  testing::decode_hostile(payload);
  return 0;
}
