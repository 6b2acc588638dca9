#include "collectives/communicator.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bindings.h"
#include "devices/cuda/device.h"
#include "transports/external/external.h"
#include "transports/loopback/loopback.h"
#include "transports/nccl/nccl.h"

namespace cccl::python {
namespace {

// A Python object that C++ threads may drop: the last owner takes the GIL to do so.
std::shared_ptr<nb::object> shared(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            if (!Py_IsInitialized()) return;
            const nb::gil_scoped_acquire gil;
            delete held;
          }};
}

// Its thread may need the GIL to drop a callback: whoever destroys it must not hold it meanwhile.
class PythonCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;
  ~PythonCommunicator() override {
    const nb::gil_scoped_release no_gil;
    close();
    engine_.reset();  // a device and NCCL may take a while to let go
  }
};

// Runs a callback that raises Python exceptions on a thread that expects C++ ones.
template <class Call>
auto in_python(Call call) {
  const nb::gil_scoped_acquire gil;
  try {
    return call();
  } catch (nb::python_error& error) {
    throw_core_error(error);
  }
}

// `transport` has post(list of (sends, address, bytes, peer, tag)) -> list of request numbers,
// wait(list of request numbers, seconds) and abort(reason).
std::shared_ptr<Transport> external_transport(int rank, int size, nb::object transport) {
  const auto object = shared(std::move(transport));
  ExternalCallbacks callbacks;
  callbacks.post = [object](std::span<Transfer> transfers) {
    in_python([&] {
      nb::list list;
      for (const auto& t : transfers)
        list.append(nb::make_tuple(t.direction == Direction::kSend,
                                   reinterpret_cast<std::uintptr_t>(t.data), t.bytes, t.peer,
                                   t.tag));
      const auto numbers = nb::cast<std::vector<Request>>(object->attr("post")(list));
      if (numbers.size() != transfers.size())
        throw TransportError("the frontend's post() returned " + std::to_string(numbers.size()) +
                             " requests for " + std::to_string(transfers.size()) + " transfers");
      for (std::size_t i = 0; i < transfers.size(); ++i) transfers[i].request = numbers[i];
    });
  };
  callbacks.wait = [object](std::span<const Request> requests, Seconds deadline) {
    in_python([&] {
      nb::list list;
      for (const auto request : requests) list.append(request);
      object->attr("wait")(list, deadline.count());
    });
  };
  callbacks.abort = [object](const std::string& reason) {
    in_python([&] { object->attr("abort")(reason); });
  };
  return make_external(rank, size, std::move(callbacks));
}

// `channel` has exchange(bytes, number, seconds) -> bytes of all ranks, tell(reason) and
// heard(wait) -> reason or "".
std::shared_ptr<Transport> nccl_transport(int rank, int size, int device, int lanes, int max_ctas,
                                          bool direct, double deadline, nb::object channel) {
  const auto object = shared(std::move(channel));
  SideChannel side;
  side.exchange = [object](Bytes mine, MutableBytes all, std::uint64_t number, Seconds limit) {
    in_python([&] {
      const auto found = nb::cast<nb::bytes>(
          object->attr("exchange")(nb::bytes(mine.data(), mine.size()), number, limit.count()));
      if (found.size() != all.size())
        throw TransportError("the side channel returned " + std::to_string(found.size()) +
                             " bytes instead of " + std::to_string(all.size()));
      std::memcpy(all.data(), found.data(), all.size());
    });
  };
  side.tell = [object](const std::string& reason) {
    in_python([&] { object->attr("tell")(reason); });
  };
  side.heard = [object](bool wait) {
    return in_python([&] { return nb::cast<std::string>(object->attr("heard")(wait)); });
  };
  const nccl::Options options{rank, size, device, lanes, max_ctas, direct, Seconds(deadline)};
  return nccl::make_transport(options, std::move(side));
}

nb::object python_error_or_none(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& failure) {
    return python_error_of(failure);
  }
  return nb::none();
}

Collective collective_of(const std::string& name) {
  for (const auto collective : {Collective::kAllReduce, Collective::kReduceScatter,
                                Collective::kAllGather, Collective::kBroadcast, Collective::kSend})
    if (name == name_of(collective)) return collective;
  throw ConfigError("unknown collective '" + name + "'");
}

// Ranges for NVTX, and for the frontend's profiler where it listens: it is called with the range's
// name and whether it begins.
RangeObserver observer_of(std::optional<nb::object> listener) {
  std::shared_ptr<nb::object> held;
  if (listener) held = shared(std::move(*listener));
  return [held](const char* name, bool begins) {
    begins ? cuda::push_range(name) : cuda::pop_range();
    if (held) in_python([&] { (*held)(name, begins); });
  };
}

std::shared_ptr<Work> submit(
    PythonCommunicator& communicator, const std::string& collective, std::uintptr_t in,
    std::size_t in_count, std::uintptr_t out, std::size_t out_count, std::uint8_t dtype,
    std::shared_ptr<Codec> contribution, std::shared_ptr<Codec> result, bool average, int root,
    std::vector<std::size_t> counts, std::size_t chunk_bytes, std::size_t window,
    const std::string& algorithm, std::uint64_t seed, bool checksum, bool raise_non_finite,
    const std::string& label, std::optional<double> deadline, double predicted, double alternative,
    std::uintptr_t stream, bool debug, std::optional<nb::object> observer,
    std::shared_ptr<StateStore> store, std::shared_ptr<Layout> layout,
    const FeedbackSettings& feedback, std::uint64_t step, std::optional<nb::object> on_done,
    const std::string& leg, bool measure_noise) {
  CollectiveCall call;
  call.collective = collective_of(collective);
  call.in = values_at(in, in_count, dtype);
  call.out = mutable_values_at(out, out_count, dtype);
  call.average = average;
  call.root = root;
  call.counts = std::move(counts);
  call.contribution = std::move(contribution);
  call.result = std::move(result);
  call.tuning = {chunk_bytes, window, std::nullopt};
  if (algorithm != "auto")
    call.tuning.algorithm = algorithm == "one_shot" ? Algorithm::kOneShot : Algorithm::kTwoShot;
  call.seed = seed;
  call.checksum = checksum;
  call.raise_non_finite = raise_non_finite;
  if (deadline) call.deadline = Seconds(*deadline);
  call.label = label;
  call.leg = leg;
  if (measure_noise) call.noise = std::make_shared<Noise>();
  call.predicted = predicted;
  call.alternative = alternative;
  call.stream = reinterpret_cast<void*>(stream);
  call.debug = debug;
  call.store = std::move(store);
  call.layout = std::move(layout);
  call.feedback = feedback;
  call.step = step;
  if (communicator.on_device()) call.observer = observer_of(std::move(observer));
  std::function<void(std::exception_ptr)> done;
  if (on_done) {
    done = [callback = shared(*on_done)](std::exception_ptr error) {
      const nb::gil_scoped_acquire gil;
      try {
        (*callback)(python_error_or_none(error));
      } catch (nb::python_error& failure) {
        failure.discard_as_unraisable("cccl: a callback at a collective's end");
      }
    };
  }
  const nb::gil_scoped_release no_gil;
  return communicator.submit(std::move(call), std::move(done));
}

// In slices, so that Ctrl-C is heard.
bool wait_for(Work& work, std::optional<double> timeout) {
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now();
  for (;;) {
    const Seconds left = Seconds(timeout.value_or(1.0)) - (Clock::now() - begun);
    {
      const nb::gil_scoped_release no_gil;
      if (work.wait(timeout ? std::clamp(left, Seconds(0), Seconds(0.1)) : Seconds(0.1)))
        return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (timeout && left.count() <= 0) return false;
  }
}

// What a stream does from now on sees the output. On a CPU nothing is to be done.
void precede(const Work& work, int device, std::uintptr_t stream) {
  const auto& done = work.output().done;
  if (done) cuda::queue_on(device, reinterpret_cast<void*>(stream))->wait(*done);
}

// Of the mean, per value: variance between ranks, square, and share of zeros. None before the work
// is done, after an error, and where nothing was measured.
nb::object noise_of(Work& work) {
  const auto& noise = work.output().noise;
  if (!noise || !work.done() || work.error() || noise->values == 0) return nb::none();
  const double values = noise->values;
  return nb::make_tuple(noise->variances / values, noise->squares / values, noise->zeros / values);
}

nb::list stats_rows() {
  nb::list list;
  for (const auto& [key, row] : process_stats().rows()) {
    nb::dict fields;
    fields["label"] = key.label;
    fields["collective"] = key.collective;
    fields["codec"] = key.codecs;
    fields["algorithm"] = key.algorithm;
    fields["dtype"] = key.dtype;
    fields["plain"] = row.plain;
    fields["reason"] = key.reason;
    fields["leg"] = key.leg;
    fields["world_size"] = row.world_size;
    fields["calls"] = row.calls;
    fields["feedback_calls"] = row.feedback_calls;
    fields["timed_calls"] = row.timed_calls;
    fields["failures"] = row.failures;
    fields["values"] = row.values;
    fields["value_bytes"] = row.value_bytes;
    fields["bytes_sent"] = row.run.bytes_sent;
    fields["bytes_received"] = row.run.bytes_received;
    fields["messages"] = row.run.messages;
    fields["encode_seconds"] = row.run.encode;
    fields["reduce_seconds"] = row.run.reduce;
    fields["decode_seconds"] = row.run.decode;
    fields["exposed_seconds"] = row.run.exposed;
    fields["total_seconds"] = row.run.total;
    fields["latency_seconds"] = row.latency;
    fields["predicted_seconds"] = row.predicted;
    fields["alternative_seconds"] = row.alternative;
    fields["error_squares"] = row.run.error_squares;
    fields["squares"] = row.run.squares;
    fields["non_finite"] = row.run.non_finite;
    fields["noise_values"] = row.run.noise.values;
    fields["noise_variances"] = row.run.noise.variances;
    fields["noise_squares"] = row.run.noise.squares;
    fields["noise_zeros"] = row.run.noise.zeros;
    list.append(fields);
  }
  return list;
}

}  // namespace

const Communicator& communicator_of(nb::handle object) {
  return nb::cast<const PythonCommunicator&>(object);
}

void register_communicator(nb::module_& module) {
  const nb::call_guard<nb::gil_scoped_release> no_gil;
  nb::class_<Transport>(module, "Transport")
      .def_prop_ro("rank", &Transport::rank)
      .def_prop_ro("size", &Transport::size);
  module.def("loopback", make_loopback);
  module.def("external_transport", external_transport);
  module.def("nccl_transport", nccl_transport, nb::arg("rank"), nb::arg("size"), nb::arg("device"),
             nb::arg("lanes"), nb::arg("max_ctas"), nb::arg("direct"), nb::arg("deadline"),
             nb::arg("channel"));
  module.def("nccl_version", [] {
    const auto found = nccl::version();
    return nb::make_tuple(found.number, nccl::text_of_version(found.number), found.path);
  });
  module.def("nccl_version_text", nccl::text_of_version);

  nb::class_<Work>(module, "Work")
      .def("wait", wait_for, nb::arg("timeout") = nb::none())
      .def("done", &Work::done)
      .def_prop_ro("seconds", &Work::seconds)
      .def_prop_ro("noise", noise_of)
      .def_prop_ro(
          "stream",
          [](const Work& work) { return reinterpret_cast<std::uintptr_t>(work.output().stream); })
      .def("precede", precede, nb::arg("device"), nb::arg("stream"), no_gil)
      .def("error", [](Work& work) { return python_error_or_none(work.error()); });

  nb::class_<PythonCommunicator>(module, "Communicator")
      .def(
          "__init__",
          [](PythonCommunicator* self, std::shared_ptr<Transport> transport, double deadline,
             std::optional<int> device, const std::vector<std::uintptr_t>& streams) {
            auto platform = device ? cuda::platform(*device) : cpu_platform();
            std::vector<void*> native;
            for (const auto stream : streams) native.push_back(reinterpret_cast<void*>(stream));
            if (!device) native = {nullptr};
            new (self) PythonCommunicator(std::move(transport), Seconds(deadline),
                                          std::move(platform), native);
          },
          nb::arg("transport"), nb::arg("deadline"), nb::arg("device") = nb::none(),
          nb::arg("streams") = std::vector<std::uintptr_t>{})
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("busy", &Communicator::busy)
      .def_prop_ro("closed", &Communicator::closed)
      .def_prop_ro(
          "failure",
          [](const PythonCommunicator& self) { return python_error_or_none(self.failure()); })
      .def("submit", submit, nb::arg("collective"), nb::arg("in_address"), nb::arg("in_count"),
           nb::arg("out_address"), nb::arg("out_count"), nb::arg("dtype"), nb::arg("contribution"),
           nb::arg("result"), nb::arg("average") = true, nb::arg("root") = 0,
           nb::arg("counts") = std::vector<std::size_t>{}, nb::arg("chunk_bytes") = 0,
           nb::arg("window") = 0, nb::arg("algorithm") = "auto", nb::arg("seed") = 0,
           nb::arg("checksum") = true, nb::arg("raise_non_finite") = false, nb::arg("label") = "",
           nb::arg("deadline") = nb::none(), nb::arg("predicted") = 0.0,
           nb::arg("alternative") = 0.0, nb::arg("stream") = 0, nb::arg("debug") = false,
           nb::arg("observer") = nb::none(), nb::arg("store") = nb::none(),
           nb::arg("layout") = nb::none(), nb::arg("feedback") = FeedbackSettings{},
           nb::arg("step") = 0, nb::arg("on_done") = nb::none(), nb::arg("leg") = "",
           nb::arg("measure_noise") = false)
      .def("agree", &Communicator::agree, nb::arg("fields"), no_gil)
      .def("abort", &Communicator::abort, no_gil)
      .def("close", &Communicator::close, no_gil);

  module.def("stats_rows", stats_rows);
  module.def("pool_bytes", &Pool::process_bytes);
  module.def("reset_stats", [] { process_stats().reset(); });
}

}  // namespace cccl::python
