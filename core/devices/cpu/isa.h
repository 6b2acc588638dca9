// Which instruction set the CPU kernels use. Every path makes the same bytes; tests force each.
#pragma once

#include <string>
#include <vector>

namespace cccl {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// What this build holds and this processor runs, slowest first.
std::vector<Isa> available_isas();
const char* name_of(Isa isa);

Isa current_isa();
void force_isa(const std::string& name);  // throws ConfigError; "auto" picks the fastest

// kernels[isa] of a table made by foreach_isa.inl.
template <class Kernels>
const Kernels& pick(const Kernels (&kernels)[3]) {
  return kernels[static_cast<int>(current_isa())];
}

}  // namespace cccl
