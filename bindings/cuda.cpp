// CUDA devices: queues on a caller's streams, and plain memory.
#include <nanobind/stl/shared_ptr.h>

#include <string>

#include "bindings.h"
#include "devices/cuda/device.h"

namespace cccl::python {
namespace {

struct DeviceMemory {
  DeviceMemory(int device, std::size_t bytes) : data(cuda::allocate(device, bytes)), bytes(bytes) {}

  std::shared_ptr<std::byte> data;
  std::size_t bytes;
};

nb::bytes read(std::uintptr_t address, std::size_t bytes, Queue& queue) {
  std::string held(bytes, 0);
  cuda::copy_to_host(reinterpret_cast<const std::byte*>(address),
                     {reinterpret_cast<std::byte*>(held.data()), bytes}, queue);
  return nb::bytes(held.data(), held.size());
}

void write(std::uintptr_t address, const nb::bytes& from, Queue& queue) {
  cuda::copy_from_host({static_cast<const std::byte*>(from.data()), from.size()},
                       reinterpret_cast<std::byte*>(address), queue);
}

}  // namespace

void register_cuda(nb::module_& module) {
  nb::class_<Queue>(module, "Queue")
      .def_prop_ro("device", [](const Queue& queue) { return queue.device().index; })
      .def("synchronize", &Queue::synchronize, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<DeviceMemory>(module, "DeviceMemory")
      .def(nb::init<int, std::size_t>())
      .def_prop_ro("address",
                   [](const DeviceMemory& memory) {
                     return reinterpret_cast<std::uintptr_t>(memory.data.get());
                   })
      .def_ro("bytes", &DeviceMemory::bytes);
  module.def("cuda_built", cuda::built);
  module.def("cuda_device_count", cuda::device_count);
  module.def("cuda_queue", [](int device, std::uintptr_t stream) {
    return cuda::queue_on(device, reinterpret_cast<void*>(stream));
  });
  module.def("read_device", read);
  module.def("write_device", write);
}

}  // namespace cccl::python
