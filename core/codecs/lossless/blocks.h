// Blocks of a lossless payload on a CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/buffer.h"
#include "codecs/lossless/lossless.h"

namespace cccl::lossless {

struct Encoded {
  std::size_t bytes;  // not filled up to whole units
  bool non_finite;
};

// Encodes up to kBlock values of a type that codes(). Writes at most as many bytes as they have,
// and nothing behind them.
Encoded encode_block(ConstValues in, bool counts_all, std::byte* out);

// `block`: all bytes up to the next block, or the body's end. Throws CorruptPayloadError.
void decode_block(Bytes block, bool last, Values out);

}  // namespace cccl::lossless
