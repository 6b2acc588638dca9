#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "api/codec.h"
#include "api/measure.h"
#include "bindings.h"
#include "devices/cpu/isa.h"
#include "devices/cpu/queue.h"
#include "devices/cpu/workers.h"
#include "devices/cuda/device.h"

namespace cccl::python {
namespace {

// The calls below take the queue of a CUDA device, or none for arrays on the CPU.
class QueueOr {
 public:
  explicit QueueOr(Queue* queue) : queue_(queue ? *queue : cpu_) {}
  operator Queue&() { return queue_; }

 private:
  CpuQueue cpu_;
  Queue& queue_;
};

std::size_t encode(const Codec& codec, std::uintptr_t in, std::size_t count, std::uint8_t dtype,
                   std::uintptr_t out, std::size_t out_bytes, std::uint64_t position,
                   std::uint64_t seed, bool checksum, Queue* queue) {
  EncodeArgs args;
  args.in = values_at(in, count, dtype);
  args.position = position;
  args.seed = seed;
  args.checksum = checksum;
  args.out = {reinterpret_cast<std::byte*>(out), out_bytes};
  return codec.encode(args, QueueOr(queue));
}

Bytes bytes_at(std::uintptr_t address, std::size_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

void decode(const Codec& codec, std::uintptr_t payload, std::size_t bytes, std::uintptr_t out,
            std::size_t count, std::uint8_t dtype, Queue* queue) {
  codec.decode(bytes_at(payload, bytes), mutable_values_at(out, count, dtype), QueueOr(queue));
}

// Sums of squared errors and of squares of what is finite, alike on every processor.
nb::tuple error_sums(const Codec& codec, std::uintptr_t in, std::size_t count, std::uint8_t dtype) {
  ErrorSums sums;
  {
    const nb::gil_scoped_release no_gil;
    CpuQueue queue;
    EncodeArgs args;
    args.in = values_at(in, count, dtype);
    std::vector<std::byte> payload(codec.max_encoded_bytes(count, args.in.dtype));
    std::vector<std::byte> decoded(args.in.bytes());
    args.out = payload;
    const Values out{decoded.data(), count, args.in.dtype};
    codec.decode(Bytes(payload).first(codec.encode(args, queue)), out, queue);
    sums = compare(args.in, out);
  }
  return nb::make_tuple(sums.error_squares, sums.squares);
}

void reduce(const Codec& codec, const std::vector<std::uintptr_t>& payloads, std::size_t bytes,
            double divisor, std::uintptr_t out, std::size_t count, std::uint8_t dtype,
            Queue* queue) {
  std::vector<Bytes> sources;
  for (const auto payload : payloads) sources.push_back(bytes_at(payload, bytes));
  codec.reduce({sources, divisor}, mutable_values_at(out, count, dtype), QueueOr(queue));
}

std::size_t reduce_encode(const Codec& codec, const std::vector<std::uintptr_t>& payloads,
                          std::size_t bytes, double divisor, const Codec& second,
                          std::uintptr_t out, std::size_t out_bytes, std::size_t count,
                          std::uint8_t dtype, std::uint64_t position, std::uint64_t seed,
                          Queue* queue, bool measures) {
  std::vector<Bytes> sources;
  for (const auto payload : payloads) sources.push_back(bytes_at(payload, bytes));
  EncodeArgs args;
  args.in = {nullptr, count, DType{dtype}};
  args.position = position;
  args.seed = seed;
  args.out = {reinterpret_cast<std::byte*>(out), out_bytes};
  return codec.reduce_encode({sources, divisor, measures}, second, args, QueueOr(queue));
}

std::vector<double> error_bound(const Codec& codec, std::uintptr_t in, std::size_t count,
                                std::uint8_t dtype) {
  std::vector<double> bound(count);
  codec.error_bound(values_at(in, count, dtype), bound);
  return bound;
}

// Of a payload on a device the header alone is looked at, in a copy: decoding checks the body.
PayloadHeader open(std::uintptr_t payload, std::size_t bytes, Queue* queue) {
  if (!queue) return open_payload(bytes_at(payload, bytes));
  std::byte head[sizeof(PayloadHeader)];
  const auto first = std::min(bytes, sizeof head);
  if (first) cuda::copy_to_host(bytes_at(payload, bytes).data(), {head, first}, *queue);
  return open_header({head, first}, bytes);
}

nb::dict header_of(std::uintptr_t payload, std::size_t bytes, Queue* queue) {
  const auto header = open(payload, bytes, queue);
  nb::dict fields;
  fields["codec"] = codec_of(header)->info().name;
  fields["dtype"] = header.dtype;
  fields["count"] = header.count;
  fields["bytes"] = sizeof header + header.body_bytes;
  fields["non_finite"] = bool(header.flags & kHasNonFinite);
  return fields;
}

// Address, shape, contiguity, dtype and device of anything that speaks DLPack or the buffer
// protocol; "owner" keeps the memory, which an exporter may have made for this call.
nb::dict describe(const nb::ndarray<nb::ro>& array) {
  std::int64_t dense = 1;
  bool contiguous = true;
  std::vector<std::int64_t> shape;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    const auto extent = static_cast<std::int64_t>(array.shape(i));
    contiguous &= extent == 1 || array.stride(i) == dense;
    dense *= extent;
    shape.insert(shape.begin(), extent);
  }
  nb::dict fields;
  // The array itself: a cast would give the exporter, which may not keep what it made.
  using Owner = nb::ndarray<nb::ro>;
  fields["owner"] = nb::capsule(new Owner(array),
                                [](void* owner) noexcept { delete static_cast<Owner*>(owner); });
  fields["address"] = reinterpret_cast<std::uintptr_t>(array.data());
  fields["shape"] = shape;
  fields["contiguous"] = contiguous || dense == 0;
  fields["dtype_code"] = static_cast<int>(array.dtype().code);
  fields["dtype_bits"] = static_cast<int>(array.dtype().bits);
  fields["dtype_lanes"] = static_cast<int>(array.dtype().lanes);
  fields["device_type"] = array.device_type();
  fields["device_id"] = array.device_id();
  return fields;
}

// With a prediction in the caller's memory, where the codec works.
std::shared_ptr<Codec> with_prediction(const Codec& codec, std::uintptr_t address,
                                       std::size_t count, std::uint8_t dtype,
                                       std::uint64_t number) {
  return std::const_pointer_cast<Codec>(
      codec.with_prediction({values_at(address, count, dtype), number}));
}

}  // namespace

void register_codec(nb::module_& module) {
  using namespace nb::literals;
  const nb::call_guard<nb::gil_scoped_release> no_gil;
  const auto queue = "queue"_a.none() = nb::none();
  nb::class_<Codec>(module, "Codec")
      .def_prop_ro("name", [](const Codec& codec) { return codec.info().name; })
      .def_prop_ro("predicts", [](const Codec& codec) { return codec.info().predicts; })
      .def_prop_ro("lossless", [](const Codec& codec) { return codec.info().lossless; })
      .def_prop_ro("fixed_size", [](const Codec& codec) { return codec.info().fixed_size; })
      .def_prop_ro("spec", &Codec::spec)
      .def_prop_ro("granularity", &Codec::granularity)
      .def("supports",
           [](const Codec& codec, std::uint8_t dtype) { return codec.supports(DType{dtype}); })
      .def("max_encoded_bytes",
           [](const Codec& codec, std::size_t count, std::uint8_t dtype) {
             return codec.max_encoded_bytes(count, DType{dtype});
           })
      .def("error_bound", error_bound)
      .def("error_sums", error_sums, "values"_a, "count"_a, "dtype"_a)
      .def("with_prediction", with_prediction, "values"_a, "count"_a, "dtype"_a, "number"_a)
      .def("encode", encode, "values"_a, "count"_a, "dtype"_a, "out"_a, "out_bytes"_a, "position"_a,
           "seed"_a, "checksum"_a, queue, no_gil)
      .def("decode", decode, "payload"_a, "bytes"_a, "out"_a, "count"_a, "dtype"_a, queue, no_gil)
      .def("reduce", reduce, "payloads"_a, "bytes"_a, "divisor"_a, "out"_a, "count"_a, "dtype"_a,
           queue, no_gil)
      .def("reduce_encode", reduce_encode, "payloads"_a, "bytes"_a, "divisor"_a, "second"_a,
           "out"_a, "out_bytes"_a, "count"_a, "dtype"_a, "position"_a, "seed"_a, queue,
           "measures"_a = false, no_gil);
  module.def("make_codec", [](const std::string& name, const Options& options) {
    return std::const_pointer_cast<Codec>(make_codec(name, options));
  });
  module.def("codec_on_cuda", [](std::shared_ptr<Codec> codec) {
    return std::const_pointer_cast<Codec>(codec_on(DeviceKind::kCuda, std::move(codec)));
  });
  module.def(
      "codec_of",
      [](std::uintptr_t payload, std::size_t bytes, Queue* on) {
        const auto kind = on ? on->device().kind : DeviceKind::kCpu;
        return std::const_pointer_cast<Codec>(codec_on(kind, codec_of(open(payload, bytes, on))));
      },
      "payload"_a, "bytes"_a, queue);
  module.def("codec_names", [] {
    std::map<std::string, std::vector<std::string>> names;
    for (const auto* entry : registered_codecs()) names[entry->info.name] = entry->info.aliases;
    return names;
  });
  module.def("header_of", header_of, "payload"_a, "bytes"_a, queue);
  module.def("describe", describe);
  module.def("dtypes", [] {
    nb::dict numbers;
    for (const auto& row : kDTypes)
      numbers[row.name] = nb::make_tuple(static_cast<int>(row.dtype), row.size, row.floating);
    return numbers;
  });
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const auto isa : available_isas()) names.push_back(name_of(isa));
    return names;
  });
  module.def("current_isa", [] { return std::string(name_of(current_isa())); });
  module.def("force_isa", force_isa);
  module.def("codec_threads", codec_threads);
  module.def("set_codec_threads", set_codec_threads);
}

}  // namespace cccl::python
