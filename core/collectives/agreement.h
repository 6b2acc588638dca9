// Ranks compare what they are about to do, so that a mismatch is an error and not a hang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "api/transport.h"

namespace cccl {

// What must be equal on every rank, as text fields: an error can name the one that is not.
struct Signature {
  static constexpr std::size_t kFieldBytes = 96;
  static constexpr const char* kFields[] = {"collective", "dtype", "count",  "op",
                                            "root",       "plan",  "codecs", "checks"};
  static constexpr std::size_t kCount = sizeof kFields / sizeof *kFields;

  char fields[kCount][kFieldBytes] = {};

  void set(const std::string& field, const std::string& value);
  std::uint64_t digest() const;
};

// A 31-bit tag of one collective: ranks that disagree never match each other's messages.
std::uint32_t tag_of(std::uint64_t sequence, std::uint64_t digest);

// Exchanges signatures with all ranks. Throws MismatchError that names the field, the ranks and
// their values, the same on every rank. `memory` must live as long as the transport: after a failed
// wait, late peers may still read and write it.
void agree(const Signature& mine, std::uint64_t sequence, Transport& transport, Queue& queue,
           Seconds deadline, std::vector<Signature>& memory);

}  // namespace cccl
