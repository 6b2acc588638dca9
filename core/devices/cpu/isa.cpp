#include "devices/cpu/isa.h"

#include <atomic>

#include "api/error.h"

namespace cccl {
namespace {

std::atomic<Isa>& selected() {
  static std::atomic<Isa> isa{available_isas().back()};
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  constexpr const char* names[] = {"baseline", "avx2", "avx512"};
  return names[static_cast<int>(isa)];
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found{Isa::kBaseline};
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) found.push_back(Isa::kAvx2);
  if (found.size() == 2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back(Isa::kAvx512);
#endif
  return found;
}

Isa current_isa() { return selected().load(std::memory_order_relaxed); }

void force_isa(const std::string& name) {
  const auto found = available_isas();
  if (name == "auto") {
    selected() = found.back();
    return;
  }
  std::string known;
  for (const auto isa : found) {
    if (name == name_of(isa)) {
      selected() = isa;
      return;
    }
    known += std::string(", ") + name_of(isa);
  }
  throw ConfigError("instruction set '" + name + "' is not available here; allowed: auto" + known);
}

}  // namespace cccl
