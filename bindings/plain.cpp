// Calls that go plain. A small one takes as long as the code before it, most of which is cold after
// a collective: the less is touched on the way, the better.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "bindings.h"
#include "collectives/communicator.h"
#include "collectives/stats.h"

namespace cccl::python {
namespace {

constexpr std::size_t kMostKept = 1024;

// An attribute, and what a method says. nanobind's own ways there do more, in code that is cold.
nb::object checked(PyObject* found) {
  if (!found) nb::raise_python_error();
  return nb::steal(found);
}

nb::object get(nb::handle object, nb::handle name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

nb::object ask(nb::handle object, nb::handle name) {
  PyObject* const arguments[] = {object.ptr()};
  return checked(PyObject_VectorcallMethod(name.ptr(), arguments, 1, nullptr));
}

std::uint64_t number(nb::object value) {
  const auto found = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred()) nb::raise_python_error();
  return found;
}

bool is_true(nb::handle value) { return value.ptr() == Py_True; }

bool same_text(nb::handle one, nb::handle other) {
  return one.is(other) || (PyUnicode_Check(one.ptr()) && PyUnicode_Check(other.ptr()) &&
                           PyUnicode_Compare(one.ptr(), other.ptr()) == 0);
}

// Plain calls made before, found again for tensors that need no closer look: of no subclass, and
// nothing but plain memory. Keeps no group alive.
class PlainCalls {
 public:
  // `groups.WORLD` is meant where no group is given.
  PlainCalls(nb::object tensor_type, nb::object strided, nb::object groups)
      : tensor_type_(std::move(tensor_type)),
        strided_(std::move(strided)),
        groups_(std::move(groups)),
        weak_(nb::module_::import_("weakref").attr("ref")) {}

  // What is given of a call, and tells it from others.
  struct Call {
    nb::handle collective, input, output, op, group, src, label, config;
  };

  // `how` it went to `group`, which is a part of the one given, or None for that one itself;
  // `communicator`: of those that have agreed on it.
  void remember(const Call& call, nb::handle group, const Communicator& communicator,
                nb::object how) {
    const auto key = key_of(call, call.group);
    const nb::object device = get(call.input, device_);
    const auto place = hash(key, call.label);
    Entries gone;
    if (entries_.size() == kMostKept) gone.swap(entries_);
    auto [at, end] = entries_.equal_range(place);
    while (at != end) {
      const auto next = std::next(at);
      if (at->second.is_like(key, call, device)) gone.insert(entries_.extract(at));
      at = next;
    }
    Entry entry{key, communicator.open(), weak_(call.group), nb::none(), device};
    if (!group.is_none()) entry.group = weak_(group);
    entry.collective = nb::borrow(call.collective);
    entry.op = nb::borrow(call.op);
    entry.src = nb::borrow(call.src);
    entry.label = nb::borrow(call.label);
    entry.config = nb::borrow(call.config);
    entry.how = std::move(how);
    entries_.emplace(place, std::move(entry));
  }

  // How a call like this one went and the group to send it with; None if there was none.
  nb::object find(const Call& call) const {
    const auto input = call.input, output = call.output;
    const bool in_place = input.is(output);
    if (!is_tensor(input) || !(in_place || is_tensor(output))) return nb::none();
    if (!PyUnicode_CheckExact(call.label.ptr())) return nb::none();
    const nb::object given = call.group.is_none() ? get(groups_, world_) : nb::borrow(call.group);
    const auto key = key_of(call, given);
    const nb::object device = get(input, device_);
    const auto [begin, end] = entries_.equal_range(hash(key, call.label));
    for (auto at = begin; at != end; ++at) {
      const Entry& entry = at->second;
      if (!*entry.open || !entry.is_like(key, call, device) || !entry.given().is(given)) continue;
      // Tensors' methods may let other threads in, who forget the entry.
      const nb::object how = entry.how, inner = entry.group.is_none() ? given : entry.group();
      if (!is_simple(input)) break;
      if (!in_place && !(is_simple(output) && are_alike(input, output, device))) break;
      return nb::make_tuple(how, inner);
    }
    return nb::none();
  }

  // All calls that these have agreed on, who must agree again.
  void forget(const Communicator& communicator) {
    const auto open = communicator.open();
    Entries gone;
    for (auto at = entries_.begin(); at != entries_.end();) {
      const auto next = std::next(at);
      if (at->second.open == open) gone.insert(entries_.extract(at));
      at = next;
    }
  }

  void clear() { Entries().swap(entries_); }

 private:
  struct Key {  // compared by identity: an entry has the config, asks for the group; dtypes stay
    const PyObject *group, *dtype, *config;
    std::uint64_t values, results;
    bool operator==(const Key&) const = default;
  };

  struct Entry {
    Key key;
    std::shared_ptr<const std::atomic<bool>> open;
    nb::object given, group;  // weak references
    nb::object device, collective, op, src, label, config, how;

    bool is_like(const Key& other, const Call& call, nb::handle where) const {
      return key == other && device.equal(where) && same_text(collective, call.collective) &&
             same_text(label, call.label) && same_text(op, call.op) && src.equal(call.src);
    }
  };

  // What is taken out of it goes when it is whole again: what it holds may let other threads in.
  using Entries = std::unordered_multimap<std::size_t, Entry>;

  Key key_of(const Call& call, nb::handle group) const {
    const auto values = count(call.input);
    return {group.ptr(), nb::object(get(call.input, dtype_)).ptr(), call.config.ptr(), values,
            call.input.is(call.output) ? values : count(call.output)};
  }

  static std::size_t hash(const Key& key, nb::handle label) {
    std::size_t mixed = static_cast<std::size_t>(PyObject_Hash(label.ptr()));
    for (const auto part :
         {reinterpret_cast<std::size_t>(key.group), reinterpret_cast<std::size_t>(key.dtype),
          reinterpret_cast<std::size_t>(key.config), std::size_t{key.values},
          std::size_t{key.results}}) {
      mixed = (mixed ^ part) * 0x9e3779b97f4a7c15u;
    }
    return mixed ^ mixed >> 32;
  }

  bool is_tensor(nb::handle tensor) const { return tensor.type().is(tensor_type_); }

  bool is_simple(nb::handle tensor) const {
    return get(tensor, layout_).is(strided_) && !is_true(get(tensor, is_nested_)) &&
           !is_true(get(tensor, requires_grad_)) && is_true(ask(tensor, is_contiguous_)) &&
           !is_true(ask(tensor, is_neg_)) && !is_true(ask(tensor, is_conj_)) &&
           address_of(tensor) != 0;
  }

  // Of one dtype on one device, without memory in common.
  bool are_alike(nb::handle input, nb::handle output, nb::handle device) const {
    if (!get(input, dtype_).is(get(output, dtype_)) || !device.equal(get(output, device_)))
      return false;
    const auto a = address_of(input), b = address_of(output);
    return a + bytes_of(input) <= b || b + bytes_of(output) <= a;
  }

  std::uint64_t count(nb::handle tensor) const { return number(ask(tensor, numel_)); }
  std::uintptr_t address_of(nb::handle tensor) const { return number(ask(tensor, data_ptr_)); }
  std::uintptr_t bytes_of(nb::handle tensor) const { return number(get(tensor, nbytes_)); }

  nb::object tensor_type_, strided_, groups_, weak_;
  nb::str world_{"WORLD"}, dtype_{"dtype"}, device_{"device"}, layout_{"layout"};
  nb::str requires_grad_{"requires_grad"}, numel_{"numel"}, nbytes_{"nbytes"};
  nb::str data_ptr_{"data_ptr"}, is_contiguous_{"is_contiguous"}, is_neg_{"is_neg"};
  nb::str is_conj_{"is_conj"}, is_nested_{"is_nested"};
  Entries entries_;
};

// `find` as the interpreter calls a function of its own: nanobind's way to it takes a microsecond.
PyObject* find_plain(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "find takes 8 arguments, not %zd", count);
    return nullptr;
  }
  try {
    return nb::inst_ptr<PlainCalls>(self)
        ->find({given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7]})
        .release()
        .ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef find_definition{
    "find", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find_plain)), METH_FASTCALL,
    "find(collective, input, output, op, group, src, label, config) -> (how, group) | None"};

// Calls of one kind that go plain. Made once: to make the names of a row for each call takes
// longer.
class PlainStats {
 public:
  PlainStats(std::string label, std::string collective, std::string dtype, std::string reason,
             int world_size, std::uint64_t values, std::uint64_t value_bytes,
             std::uint64_t bytes_sent, double predicted, double alternative)
      : key_{std::move(label), std::move(collective), "plain", "backend",
             std::move(dtype), std::move(reason),     ""} {
    row_.calls = 1;
    row_.values = values;
    row_.value_bytes = value_bytes;
    row_.world_size = world_size;
    row_.plain = true;
    row_.predicted = predicted;
    row_.alternative = alternative;
    row_.run.bytes_sent = row_.run.bytes_received = bytes_sent;
  }

  void record(double seconds) const {
    auto row = row_;
    row.latency = seconds;
    process_stats().add(key_, row);
  }

 private:
  StatsKey key_;
  StatsRow row_;
};

}  // namespace

void register_plain(nb::module_& module) {
  nb::class_<PlainCalls>(module, "PlainCalls")
      .def(nb::init<nb::object, nb::object, nb::object>())
      .def(
          "remember",
          [](PlainCalls& self, nb::handle collective, nb::handle input, nb::handle output,
             nb::handle op, nb::handle given, nb::handle src, nb::handle label, nb::handle config,
             nb::object group, nb::handle communicator, nb::object how) {
            self.remember({collective, input, output, op, given, src, label, config}, group,
                          communicator_of(communicator), std::move(how));
          },
          nb::arg("collective"), nb::arg("input"), nb::arg("output"), nb::arg("op"),
          nb::arg("given"), nb::arg("src"), nb::arg("label"), nb::arg("config"),
          nb::arg("group").none(), nb::arg("communicator"), nb::arg("how"))
      .def_prop_ro(
          "find",
          [](nb::object self) { return nb::steal(PyCFunction_New(&find_definition, self.ptr())); })
      .def("forget", [](PlainCalls& self,
                        nb::handle communicator) { self.forget(communicator_of(communicator)); })
      .def("clear", &PlainCalls::clear);
  nb::class_<PlainStats>(module, "PlainStats")
      .def(nb::init<std::string, std::string, std::string, std::string, int, std::uint64_t,
                    std::uint64_t, std::uint64_t, double, double>())
      .def("record", &PlainStats::record);
}

}  // namespace cccl::python
