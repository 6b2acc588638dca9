#include "support.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "devices/cpu/convert.h"
#include "transports/loopback/loopback.h"

namespace cccl::testing {
namespace {

bool is_gathered(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather;
}

// Relative error of rounding to the dtype, and of one addition in its accumulator.
double rounding_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 0x1p-11;
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat64: return 0x1p-53;
    default: return 0x1p-24;
  }
}
double addition_error(DType dtype) { return dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24; }

std::uint64_t next_random(std::uint64_t& state) {  // splitmix64 (S. Vigna, public domain)
  std::uint64_t x = state += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Array::Array(DType dtype, const std::vector<double>& values) : Array(dtype, values.size()) {
  if (values.empty()) return;
  const std::vector<float> narrow(values.begin(), values.end());
  dtype == DType::kFloat64 ? store(dtype, values.data(), count_, view().data)
                           : store(dtype, narrow.data(), count_, view().data);
}

std::vector<double> Array::values() const {
  std::vector<double> wide(count_);
  std::vector<float> narrow(count_);
  if (count_ == 0) return {};
  if (dtype_ == DType::kFloat64) return load(dtype_, view().data, count_, wide.data()), wide;
  load(dtype_, view().data, count_, narrow.data());
  return {narrow.begin(), narrow.end()};
}

void Array::set(std::size_t i, double value) {
  const Array one(dtype_, std::vector{value});
  std::memcpy(view().part(i, 1).data, one.view().data, one.bytes());
}

bool Array::same_bits(const Array& other) const {
  return dtype_ == other.dtype_ && memory_ == other.memory_;
}

Array random_array(DType dtype, std::size_t count, std::uint64_t seed) {
  std::vector<double> values(count);
  std::uint64_t state = seed * 0x2545F4914F6CDD1Du;
  double scale = 1;
  const bool sparse = seed % 2;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = next_random(state);
    if (i % 48 == 0) scale = std::ldexp(1.0, static_cast<int>(bits >> 60) - 10);
    const double sum =
        static_cast<double>(bits & 0xFFFF) + static_cast<double>(bits >> 16 & 0xFFFF);
    const auto pick = bits >> 32;
    values[i] = (sparse ? pick % 16 == 0 : pick % 8 != 0) ? scale * (sum / 0x1p16 - 1) : 0.0;
  }
  return {dtype, values};
}

std::vector<std::shared_ptr<const Codec>> all_codecs() {
  std::vector<std::shared_ptr<const Codec>> codecs;
  std::set<std::string> specs;
  const std::vector<Options> variants = {{},
                                         {{"rounding", "stochastic"}},
                                         {{"level", "best"}},
                                         {{"block_size", std::int64_t{32}}},
                                         {{"rotation", "hadamard"}},
                                         {{"inner", "cast_bf16"}}};
  for (const auto* entry : registered_codecs())
    for (const auto& options : variants) try {
        // Block codecs of other widths share the source of their options with those of 8 and 4
        // bits.
        const bool shares = entry->info.id >= 6 && entry->info.id <= 9;
        if (shares && !options.empty()) continue;
        auto codec = make_codec(entry->info.name, options);
        if (specs.insert(codec->spec()).second) codecs.push_back(std::move(codec));
      } catch (const ConfigError&) {  // not an option of this codec
        if (options.empty()) throw;
      }
  return codecs;
}

std::string test_name(const Codec& codec) {
  std::string name;
  for (const char c : codec.spec())
    if (std::isalnum(static_cast<unsigned char>(c))) name += c;
  return name;
}

Setup setup_of(Collective collective, const std::string& contribution, const std::string& result) {
  Setup setup;
  setup.collective = collective;
  setup.contribution = make_codec(contribution);
  setup.result = make_codec(result);
  return setup;
}

std::vector<std::size_t> uneven(std::size_t count, int size) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(size));
  std::size_t left = count;
  for (int rank = 0; rank < size; ++rank) {
    if (size >= 3 && rank == 1) continue;
    counts[rank] = rank == size - 1 ? left : left / 2;
    left -= counts[rank];
  }
  return counts;
}

Group::Group(int size, Seconds deadline) : Group(make_loopback(size), deadline) {}

Group::Group(std::vector<std::shared_ptr<Transport>> transports, Seconds deadline) {
  for (auto& transport : transports)
    ranks_.push_back(std::make_unique<Communicator>(std::move(transport), deadline));
}

CollectiveCall Group::Round::call(int rank) {
  CollectiveCall call;
  call.collective = setup.collective;
  call.in = in[rank].view();
  call.out = out[rank].view();
  call.average = setup.average;
  call.root = setup.root;
  call.counts = counts;
  call.contribution = setup.contribution;
  call.result = setup.result;
  call.tuning = setup.tuning;
  call.seed = setup.seed;
  return call;
}

Group::Round Group::round(const Setup& setup, DType dtype, std::size_t count,
                          std::uint64_t seed) const {
  Round round{setup, {}, {}, {}};
  if (is_gathered(setup.collective)) round.counts = uneven(count, size());
  for (int rank = 0; rank < size(); ++rank) {
    const bool gathers = setup.collective == Collective::kAllGather;
    const bool scatters = setup.collective == Collective::kReduceScatter;
    round.in.push_back(
        random_array(dtype, gathers ? round.counts[rank] : count, seed * 1000 + rank));
    // What no input makes, so that an unwritten output is seen.
    round.out.emplace_back(dtype, std::vector(scatters ? round.counts[rank] : count, 12345.0));
  }
  return round;
}

std::vector<std::exception_ptr> Group::attempt(std::vector<CollectiveCall> calls) {
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < size(); ++rank)
    works.push_back(ranks_[rank]->submit(std::move(calls[rank])));
  std::vector<std::exception_ptr> errors;
  for (const auto& work : works) try {
      if (!work->wait(Seconds{120})) throw Error("a collective hangs");
      errors.push_back(nullptr);
    } catch (...) {
      errors.push_back(std::current_exception());
    }
  return errors;
}

std::vector<std::exception_ptr> Group::attempt(Round& round) {
  std::vector<CollectiveCall> calls;
  for (int rank = 0; rank < size(); ++rank) calls.push_back(round.call(rank));
  return attempt(std::move(calls));
}

void Group::run(Round& round) {
  for (const auto& error : attempt(round))
    if (error) std::rethrow_exception(error);
}

namespace {

// The codec's bound for each value of `in`, whose parts of these sizes are encoded apart.
std::vector<double> bounds(const Codec& codec, const Array& in,
                           const std::vector<std::size_t>& parts) {
  std::vector<double> bound(in.count());
  std::size_t first = 0;
  for (const auto part : parts) {
    codec.error_bound(in.view().part(first, part), std::span(bound).subspan(first, part));
    first += part;
  }
  return bound;
}

Expected expected_copy(const Group::Round& round) {
  const bool gathers = round.setup.collective == Collective::kAllGather;
  Expected expected;
  for (std::size_t rank = 0; rank < round.in.size(); ++rank) {
    const auto& in = round.in[rank];
    if (!gathers && static_cast<int>(rank) != round.setup.root) continue;
    const auto values = in.values();
    expected.exact.insert(expected.exact.end(), values.begin(), values.end());
    const auto bound = bounds(*round.setup.result, in, {in.count()});
    expected.tolerance.insert(expected.tolerance.end(), bound.begin(), bound.end());
  }
  return expected;
}

}  // namespace

Expected expected_of(const Group::Round& round) {
  if (!reduces(round.setup.collective)) return expected_copy(round);
  const std::size_t count = round.in[0].count();
  const auto dtype = round.in[0].dtype();
  const double divisor = round.setup.average ? static_cast<double>(round.in.size()) : 1;
  const auto parts = round.counts.empty() ? std::vector{count} : round.counts;
  Expected expected{std::vector<double>(count), std::vector<double>(count)};
  std::vector<double> magnitude(count);
  for (const auto& in : round.in) {
    const auto bound = bounds(*round.setup.contribution, in, parts);
    const auto values = in.values();
    for (std::size_t i = 0; i < count; ++i) {
      expected.exact[i] += values[i] / divisor;
      expected.tolerance[i] += bound[i] / divisor;
      magnitude[i] += (std::abs(values[i]) + bound[i]) / divisor;
    }
  }
  // The second leg encodes sums that are themselves off: its bound is that of the largest ones.
  std::vector<double> largest(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double additions = static_cast<double>(round.in.size() + 1) * addition_error(dtype);
    expected.tolerance[i] += additions * magnitude[i];
    largest[i] = (std::abs(expected.exact[i]) + expected.tolerance[i]) * (1 + 0x1p-6);
  }
  std::vector<double> second(count);
  if (round.setup.collective == Collective::kAllReduce)
    second = bounds(*round.setup.result, Array(dtype, largest), parts);
  for (std::size_t i = 0; i < count; ++i)
    expected.tolerance[i] += second[i] + (largest[i] + second[i]) * rounding_of(dtype) + 0x1p-24;
  return expected;
}

}  // namespace cccl::testing
