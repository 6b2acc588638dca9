// What a rank keeps of tensors between steps: residuals of error feedback, and the last mean as a
// prediction of the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "api/codec.h"
#include "api/device.h"
#include "api/residual.h"
#include "devices/cpu/platform.h"
#include "scheduler/plan.h"

namespace cccl {

// The parameters that a tensor is made of, in order.
struct Piece {
  std::string name;
  std::size_t count;
  bool operator==(const Piece&) const = default;
};
struct Layout {
  std::vector<Piece> pieces;
  bool operator==(const Layout&) const = default;
};

struct FeedbackSettings {
  bool sender = false, owner = false;  // of the first leg and of the second
  ResidualType type = ResidualType::kBFloat16;
  float decay = 1;
};

// Where a store keeps what it keeps, and what it does there.
struct Home {
  explicit Home(std::shared_ptr<const Platform> platform);
  bool on_device() const { return platform->device().kind != DeviceKind::kCpu; }

  std::shared_ptr<const Platform> platform;
  std::unique_ptr<Queue> queue;
  std::unique_ptr<Allocator> allocator;
  std::shared_ptr<std::byte> spoiled;            // on a device: Residual::spoiled of a step
  std::map<void*, std::shared_ptr<Event>> ends;  // of the last collective on each stream
};

// A residual, and the one that takes its place once the step is known to be sound.
class ResidualMemory {
 public:
  // All zero.
  void begin(ResidualType type, std::size_t count, const std::string& kind,
             const std::shared_ptr<Home>& home);
  bool holds(ResidualType type, std::size_t count, const std::string& kind) const {
    return memory_ && type == type_ && count == count_ && kind == kind_;
  }
  bool empty() const { return !memory_; }
  void accept() { current_ ^= 1; }

  Residual view(float decay, std::uint32_t* spoiled) const;
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return memory_ ? 2 * stride_ : 0; }

  // What is kept, which on a device is waited for; and other content in its place.
  std::vector<std::byte> content() const;
  void replace(Bytes content);
  void replace(const std::vector<float>& values);

  ResidualType type() const { return type_; }
  const std::string& kind() const { return kind_; }

  // On a device, behind the two: Residual::swapped, and a `spoiled` of its own.
  std::uint32_t* words() const {
    return reinterpret_cast<std::uint32_t*>(memory_.get() + 2 * stride_);
  }

 private:
  std::byte* half(int which) const { return memory_.get() + which * stride_; }
  int current() const;

  ResidualType type_ = ResidualType::kFloat32;
  std::size_t count_ = 0, stride_ = 0;
  std::string kind_;  // of the plan that places its values
  int current_ = 0;   // on a CPU
  std::shared_ptr<Home> home_;
  std::shared_ptr<std::byte> memory_;
};

// The last mean. It holds for one engine: another one's ranks may have seen other means.
struct PredictionMemory {
  std::shared_ptr<Home> home;  // whose queue `memory` is given back in
  std::shared_ptr<std::byte> memory;
  Values values;
  std::uint64_t number = 0;  // of means that it has seen
  std::uint64_t engine = 0;

  std::size_t bytes() const { return memory ? values.bytes() : 0; }
};

struct TensorState {
  std::string key;
  Layout layout;
  ResidualMemory sender, owner;
  PredictionMemory prediction;
  std::size_t pieces = 0;            // that no other tensor has taken over
  bool used = false, sound = false;  // in the step under way
  std::uint32_t* spoiled = nullptr;  // on a device, where its work says so; none: nobody asks
};

// A tensor's state as it is saved. Empty bytes: none.
struct SavedResidual {
  ResidualType type = ResidualType::kFloat32;
  std::size_t count = 0;
  std::string kind;
  std::vector<std::byte> bytes;
};
struct SavedState {
  std::string key;
  Layout layout;
  SavedResidual sender, owner;
};

// Thread-safe. A residual belongs to parameters: where they come in another tensor, it follows.
class StateStore {
 public:
  StateStore();
  ~StateStore();
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // Throws UnsupportedError if it is in use on another device.
  void check_place(Device device) const;

  // Of a collective that is about to run in `step`, which is 0 where calls know of no steps. What
  // earlier steps left becomes what is kept, unless one of the same step was not sound. Its work
  // goes into `queue`, of that platform; launched() is to be told where it ends.
  std::shared_ptr<TensorState> use(const std::string& key, const Layout& layout,
                                   const FeedbackSettings& settings, const Plan& plan,
                                   std::uint64_t step,
                                   const std::shared_ptr<const Platform>& platform, Queue& queue);
  void launched(const Queue& queue, std::shared_ptr<Event> end);

  // What is known of values like these before a collective of that engine in `queue`, which then is
  // to write its result there. All ranks of the engine get the same.
  Prediction predict(TensorState& state, ConstValues like, std::uint64_t engine, Queue& queue);
  void succeeded(TensorState& state);

  void reset();
  std::size_t bytes() const;
  std::uint64_t resets() const;  // residuals begun anew since shape, plan or type had changed
  std::uint64_t moves() const;   // tensors whose residual came from others

  std::vector<SavedState> save();
  // In place of everything. Of several ranks' states, their mean: whose sum over as many ranks as
  // load it, divided by those, is what the sum over the old ones was.
  void load(const std::vector<std::vector<SavedState>>& ranks);

  static std::size_t process_bytes();  // of all stores of this process

 private:
  struct Place {
    std::shared_ptr<TensorState> state;
    std::size_t first, count;
  };
  bool is_on(Device device) const;
  void end_step();
  void settle(TensorState& state);
  void settle_on_device(std::span<TensorState* const> states, std::uint32_t* spoiled, bool last);
  void move_to(const std::shared_ptr<const Platform>& platform);
  std::vector<SavedState> save_all();
  void load_all(const std::vector<std::vector<SavedState>>& ranks);
  bool renew(ResidualMemory& memory, bool wanted, const FeedbackSettings& settings,
             std::size_t count, const std::string& kind);
  void take_over(TensorState& state);
  void put(const std::shared_ptr<TensorState>& state);
  void count_bytes();

  mutable std::mutex mutex_;
  std::shared_ptr<Home> home_;
  bool in_use_ = false;  // since it was made, loaded or reset
  std::map<std::string, std::shared_ptr<TensorState>> tensors_;
  std::map<std::string, Place> pieces_;
  std::uint64_t step_ = 0, resets_ = 0, moves_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace cccl
