// What the tests of codecs and collectives share: arrays, codecs to test, ranks as threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "api/codec.h"
#include "api/transport.h"
#include "collectives/communicator.h"

namespace cccl {

// How GoogleTest shows a codec.
inline void PrintTo(const std::shared_ptr<const Codec>& codec, std::ostream* out) {
  *out << codec->spec();
}

}  // namespace cccl

namespace cccl::testing {

inline constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                    DType::kFloat64};

// Values of any dtype, on purpose one byte off every alignment.
class Array {
 public:
  Array(DType dtype, std::size_t count) : dtype_(dtype), count_(count), memory_(bytes() + 1) {}
  Array(DType dtype, const std::vector<double>& values);

  std::size_t count() const { return count_; }
  std::size_t bytes() const { return count_ * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  Values view() { return {memory_.data() + 1, count_, dtype_}; }
  ConstValues view() const { return {memory_.data() + 1, count_, dtype_}; }
  std::vector<double> values() const;
  void set(std::size_t i, double value);
  bool same_bits(const Array& other) const;

 private:
  DType dtype_;
  std::size_t count_;
  std::vector<std::byte> memory_;
};

// Gradient-like values: zeros, most of them where `seed` is odd, and magnitudes that differ from
// block to block.
Array random_array(DType dtype, std::size_t count, std::uint64_t seed);

// Every registered codec, with the common options that it takes.
std::vector<std::shared_ptr<const Codec>> all_codecs();

// A spec as a part of a test's name.
std::string test_name(const Codec& codec);

// `count` values over the ranks, unevenly, with an empty rank where there are three or more.
std::vector<std::size_t> uneven(std::size_t count, int size);

struct Setup {
  Collective collective = Collective::kAllReduce;
  std::shared_ptr<const Codec> contribution, result;
  bool average = true;
  int root = 0;
  Tuning tuning;
  std::uint64_t seed = 7;
};
Setup setup_of(Collective collective, const std::string& contribution, const std::string& result);

// All ranks of a group, each with a communicator.
class Group {
 public:
  static constexpr Seconds kDeadline{60};

  explicit Group(int size, Seconds deadline = kDeadline);
  Group(std::vector<std::shared_ptr<Transport>> transports, Seconds deadline);

  int size() const { return static_cast<int>(ranks_.size()); }
  Communicator& rank(int rank) { return *ranks_[rank]; }
  void close(int rank) { ranks_[rank].reset(); }

  // The calls of all ranks: inputs for a tensor of `count` values, outputs of their size.
  struct Round {
    Setup setup;
    std::vector<std::size_t> counts;  // per rank, where ranks hold parts
    std::vector<Array> in, out;

    CollectiveCall call(int rank);
  };
  Round round(const Setup& setup, DType dtype, std::size_t count, std::uint64_t seed = 1) const;

  // Runs the calls and returns the error of each rank, null where there was none.
  std::vector<std::exception_ptr> attempt(std::vector<CollectiveCall> calls);
  std::vector<std::exception_ptr> attempt(Round& round);

  // The same for a round that must succeed; throws the first error.
  void run(Round& round);

 private:
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

// How far each output of a reduction or a copy may be from `exact` by the codecs' stated bounds.
struct Expected {
  std::vector<double> exact, tolerance;
};
Expected expected_of(const Group::Round& round);

}  // namespace cccl::testing
