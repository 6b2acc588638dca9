#include "collectives/state.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "api/error.h"
#include "bindings.h"

namespace cccl::python {
namespace {

ResidualType type_named(const std::string& name) {
  const auto* const found = std::ranges::find(kResidualTypes, name);
  if (found == std::end(kResidualTypes))
    throw ConfigError("unknown type of residual '" + name + "'");
  return static_cast<ResidualType>(found - kResidualTypes);
}

Layout layout_of(const std::vector<std::pair<std::string, std::size_t>>& pieces) {
  Layout layout;
  for (const auto& [name, count] : pieces) layout.pieces.push_back({name, count});
  return layout;
}

// As dicts of plain values, so that whatever stores them needs nothing of ours.
nb::dict to_dict(const SavedResidual& residual) {
  nb::dict fields;
  fields["type"] = kResidualTypes[static_cast<int>(residual.type)];
  fields["count"] = residual.count;
  fields["kind"] = residual.kind;
  fields["bytes"] = nb::bytes(residual.bytes.data(), residual.bytes.size());
  return fields;
}

SavedResidual residual_of(const nb::dict& fields) {
  SavedResidual residual;
  residual.type = type_named(nb::cast<std::string>(fields["type"]));
  residual.count = nb::cast<std::size_t>(fields["count"]);
  residual.kind = nb::cast<std::string>(fields["kind"]);
  const auto bytes = nb::cast<nb::bytes>(fields["bytes"]);
  residual.bytes.resize(bytes.size());
  std::memcpy(residual.bytes.data(), bytes.data(), bytes.size());
  return residual;
}

nb::list save(StateStore& store) {
  std::vector<SavedState> all;
  {
    const nb::gil_scoped_release no_gil;
    all = store.save();
  }
  nb::list list;
  for (const auto& state : all) {
    nb::list layout;
    for (const auto& [name, count] : state.layout.pieces)
      layout.append(nb::make_tuple(name, count));
    nb::dict fields;
    fields["key"] = state.key;
    fields["layout"] = layout;
    fields["sender"] = to_dict(state.sender);
    fields["owner"] = to_dict(state.owner);
    list.append(fields);
  }
  return list;
}

void load(StateStore& store, const std::vector<std::vector<nb::dict>>& ranks) {
  using Pieces = std::vector<std::pair<std::string, std::size_t>>;
  std::vector<std::vector<SavedState>> all;
  for (const auto& rank : ranks) {
    auto& states = all.emplace_back();
    for (const auto& fields : rank)
      states.push_back({nb::cast<std::string>(fields["key"]),
                        layout_of(nb::cast<Pieces>(fields["layout"])),
                        residual_of(nb::cast<nb::dict>(fields["sender"])),
                        residual_of(nb::cast<nb::dict>(fields["owner"]))});
  }
  const nb::gil_scoped_release no_gil;
  store.load(all);
}

}  // namespace

void register_state(nb::module_& module) {
  const nb::call_guard<nb::gil_scoped_release> no_gil;
  nb::class_<Layout>(module, "Layout")
      .def(
          "__init__",
          [](Layout* self, const std::vector<std::pair<std::string, std::size_t>>& pieces) {
            new (self) Layout(layout_of(pieces));
          },
          nb::arg("pieces"))
      .def_prop_ro("pieces", [](const Layout& layout) {
        std::vector<std::pair<std::string, std::size_t>> pieces;
        for (const auto& [name, count] : layout.pieces) pieces.emplace_back(name, count);
        return pieces;
      });
  nb::class_<FeedbackSettings>(module, "FeedbackSettings")
      .def(
          "__init__",
          [](FeedbackSettings* self, bool sender, bool owner, const std::string& type,
             float decay) { new (self) FeedbackSettings{sender, owner, type_named(type), decay}; },
          nb::arg("sender"), nb::arg("owner"), nb::arg("type"), nb::arg("decay"))
      .def_ro("sender", &FeedbackSettings::sender)
      .def_ro("owner", &FeedbackSettings::owner);
  nb::class_<StateStore>(module, "StateStore")
      .def("__init__", [](StateStore* self) { new (self) StateStore(); })
      .def_prop_ro("bytes", &StateStore::bytes)
      .def_prop_ro("resets", &StateStore::resets)
      .def_prop_ro("moves", &StateStore::moves)
      .def("reset", &StateStore::reset, no_gil)
      .def("save", save)
      .def("load", load, nb::arg("ranks"));
  module.def("state_bytes", &StateStore::process_bytes);
}

}  // namespace cccl::python
