// Codecs with a residual, on raw memory: for tests and measurements, which stores are in the way
// of.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "api/codec.h"
#include "api/residual.h"
#include "bindings.h"
#include "devices/cpu/platform.h"
#include "devices/cpu/queue.h"
#include "devices/cpu/residual.h"
#include "devices/cuda/device.h"

namespace cccl::python {
namespace {

// A residual of `count` values, and where in it those to be encoded begin.
struct Memory {
  Memory(const std::string& type, std::uintptr_t kept, std::uintptr_t next, std::size_t count,
         std::size_t first, float decay) {
    residual.type = residual_type_named(type);
    residual.kept = reinterpret_cast<const std::byte*>(kept);
    residual.next = reinterpret_cast<std::byte*>(next);
    residual.count = count;
    residual.first = first;
    residual.decay = decay;
  }
  Residual residual;
};

EncodeArgs args_of(ConstValues values, std::uintptr_t out, std::size_t out_bytes,
                   std::uint64_t seed) {
  EncodeArgs args;
  args.in = values;
  args.seed = seed;
  args.out = {reinterpret_cast<std::byte*>(out), out_bytes};
  return args;
}

// use(platform, queue) of that queue's device, or of the CPU.
template <class Use>
std::size_t on_device_of(Queue* queue, Use use) {
  CpuQueue cpu;
  if (!queue) return use(*cpu_platform(), cpu);
  return use(*cuda::platform(queue->device().index), *queue);
}

std::size_t encode(const Codec& codec, std::uintptr_t in, std::size_t count, std::uint8_t dtype,
                   std::uintptr_t out, std::size_t out_bytes, std::uint64_t seed,
                   const Memory& memory, Queue* queue) {
  const auto args = args_of(values_at(in, count, dtype), out, out_bytes, seed);
  return on_device_of(queue, [&](const Platform& platform, Queue& on) {
    return platform.encode(codec, args, memory.residual, on);
  });
}

std::size_t reduce_encode(const Codec& first, const std::vector<std::uintptr_t>& payloads,
                          std::size_t bytes, double divisor, const Codec& second,
                          std::uintptr_t out, std::size_t out_bytes, std::size_t count,
                          std::uint8_t dtype, std::uint64_t seed, const Memory& memory,
                          Queue* queue) {
  std::vector<Bytes> sources;
  for (const auto payload : payloads)
    sources.emplace_back(reinterpret_cast<const std::byte*>(payload), bytes);
  const auto target = args_of({nullptr, count, DType{dtype}}, out, out_bytes, seed);
  return on_device_of(queue, [&](const Platform& platform, Queue& on) {
    return platform.reduce_encode(first, {sources, divisor}, second, target, memory.residual, on);
  });
}

}  // namespace

ResidualType residual_type_named(const std::string& name) {
  const auto* const found = std::ranges::find(kResidualTypes, name);
  if (found == std::end(kResidualTypes))
    throw ConfigError("unknown type of residual '" + name + "'");
  return static_cast<ResidualType>(found - kResidualTypes);
}

void register_residual(nb::module_& module) {
  using namespace nb::literals;
  const nb::call_guard<nb::gil_scoped_release> no_gil;
  const auto queue = "queue"_a.none() = nb::none();
  nb::class_<Memory>(module, "Residual")
      .def(nb::init<const std::string&, std::uintptr_t, std::uintptr_t, std::size_t, std::size_t,
                    float>(),
           "type"_a, "kept"_a, "next"_a, "count"_a, "first"_a = 0, "decay"_a = 1.0F);
  module.def(
      "residual_bytes",
      [](const std::string& type, std::size_t count) {
        return residual_bytes(residual_type_named(type), count);
      },
      "type"_a, "count"_a);
  module.def("encode_corrected", encode, "codec"_a, "values"_a, "count"_a, "dtype"_a, "out"_a,
             "out_bytes"_a, "seed"_a, "residual"_a, queue, no_gil);
  module.def("reduce_encode_corrected", reduce_encode, "codec"_a, "payloads"_a, "bytes"_a,
             "divisor"_a, "second"_a, "out"_a, "out_bytes"_a, "count"_a, "dtype"_a, "seed"_a,
             "residual"_a, queue, no_gil);
}

}  // namespace cccl::python
