// Decoding of bytes that nobody may trust, shared by the tests and the fuzzer.
#pragma once

#include "api/codec.h"

namespace cccl::testing {

// Does with `payload` what a receiver does, in memory of exactly the right size: decodes it by
// itself, and as one of two payloads in a sum. True if it was accepted, false if it was refused
// with CorruptPayloadError; any other exception passes on.
bool decode_hostile(Bytes payload);

}  // namespace cccl::testing
