#include "collectives/state.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "devices/cpu/residual.h"

namespace cccl {
namespace {

std::atomic<std::size_t> kept_bytes{0};

std::size_t padded(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// What places the values of a contribution's residual.
std::string kind_of_sender(const Plan& plan) {
  const auto& args = plan.args();
  if (args.collective == Collective::kAllReduce) return "";
  std::string kind = name_of(args.collective);
  for (const auto count : args.counts) kind += " " + std::to_string(count);
  return kind;
}

std::string kind_of_owner(const Plan& plan) {
  const auto& args = plan.args();
  return std::string(name_of(args.algorithm)) + ", rank " + std::to_string(args.rank) + " of " +
         std::to_string(args.size) + ", chunk " + std::to_string(args.chunk) + ", granularity " +
         std::to_string(args.granularity);
}

// The step's residual becomes what is kept, if all went well.
void settle_on_cpu(TensorState& state, bool sound) {
  if (state.used && sound) {
    state.sender.accept();
    state.owner.accept();
  }
  state.used = state.sound = false;
}

SavedResidual saved(const ResidualMemory& memory) {
  return {memory.type(), memory.count(), memory.kind(), memory.content()};
}

// Any values of a residual's content.
void read(const SavedResidual& residual, std::size_t first, std::size_t n, float* values) {
  const std::size_t step = residual_granularity(residual.type);
  float tile[kTile];
  while (n > 0) {
    const std::size_t begin = first / step * step, skipped = first - begin;
    const std::size_t found = std::min(kTile, residual.count - begin),
                      wanted = std::min(n, found - skipped);
    load_residual(residual.type, residual.bytes.data(), residual.count, begin, found, tile);
    values = std::copy_n(tile + skipped, wanted, values);
    first += wanted;
    n -= wanted;
  }
}

std::string name_of(Device device) {
  return device.kind == DeviceKind::kCpu ? "the CPU"
                                         : "CUDA device " + std::to_string(device.index);
}

}  // namespace

Home::Home(std::shared_ptr<const Platform> on)
    : platform(std::move(on)),
      queue(platform->new_queue()),
      allocator(platform->allocator_for(*queue)) {
  if (!on_device()) return;
  spoiled = allocator->allocate(kPayloadAlignment);
  platform->clear({spoiled.get(), kPayloadAlignment}, *queue);
}

void ResidualMemory::begin(ResidualType type, std::size_t count, const std::string& kind,
                           const std::shared_ptr<Home>& home) {
  type_ = type;
  count_ = count;
  kind_ = kind;
  stride_ = padded(residual_bytes(type, count), kPayloadAlignment);
  current_ = 0;
  home_ = home;
  const std::size_t bytes = 2 * stride_ + kPayloadAlignment;
  memory_ = home->allocator->allocate(bytes);
  home->platform->clear({memory_.get(), bytes}, *home->queue);
}

Residual ResidualMemory::view(float decay, std::uint32_t* spoiled) const {
  Residual residual{type_, half(current_), half(current_ ^ 1), count_, 0, decay};
  if (home_->on_device()) {
    residual.swapped = words();
    residual.spoiled = spoiled;
  }
  return residual;
}

int ResidualMemory::current() const {
  if (!home_->on_device()) return current_;
  std::uint32_t swapped = 0;
  home_->platform->read(reinterpret_cast<const std::byte*>(words()),
                        std::as_writable_bytes(std::span(&swapped, 1)), *home_->queue);
  return static_cast<int>(swapped);
}

std::vector<std::byte> ResidualMemory::content() const {
  if (!memory_) return {};
  std::vector<std::byte> content(residual_bytes(type_, count_));
  home_->platform->read(half(current()), content, *home_->queue);
  return content;
}

void ResidualMemory::replace(Bytes content) {
  home_->platform->write(content, half(current()), *home_->queue);
}

void ResidualMemory::replace(const std::vector<float>& values) {
  std::vector<std::byte> content(residual_bytes(type_, count_));
  for (std::size_t first = 0; first < count_; first += kTile)
    store_residual(type_, values.data() + first, count_, first, std::min(kTile, count_ - first),
                   content.data());
  replace(Bytes(content));
}

StateStore::StateStore() : home_(std::make_shared<Home>(cpu_platform())) {}

StateStore::~StateStore() { kept_bytes -= bytes_; }

bool StateStore::is_on(Device device) const {
  const auto own = home_->platform->device();
  return own.kind == device.kind && own.index == device.index;
}

void StateStore::check_place(Device device) const {
  const std::lock_guard lock(mutex_);
  if (!in_use_ || is_on(device)) return;
  throw UnsupportedError("what is kept of tensors between steps is on " +
                         name_of(home_->platform->device()) + " here, and this tensor on " +
                         name_of(device) + ": give tensors of another device a group of their own");
}

// What was loaded moves to where it is used first.
void StateStore::move_to(const std::shared_ptr<const Platform>& platform) {
  if (is_on(platform->device())) return;
  const auto all = save_all();
  home_ = std::make_shared<Home>(platform);
  load_all({all});
}

void StateStore::launched(const Queue& queue, std::shared_ptr<Event> end) {
  const std::lock_guard lock(mutex_);
  if (home_->on_device()) home_->ends[queue.native()] = std::move(end);
}

// A device's own work knows whether the step was sound: behind it, without the host. `last`: no
// other tensor goes by the same word.
void StateStore::settle_on_device(std::span<TensorState* const> states, std::uint32_t* spoiled,
                                  bool last) {
  std::vector<std::uint32_t*> swapped;
  for (auto* const state : states) {
    if (!std::exchange(state->used, false)) continue;
    for (const auto* memory : {&state->sender, &state->owner})
      if (!memory->empty()) swapped.push_back(memory->words());
  }
  auto& queue = *home_->queue;
  for (const auto& [_, end] : home_->ends) queue.wait(*end);
  home_->ends.clear();
  home_->platform->swap(swapped, spoiled, queue);
  if (spoiled && last)
    home_->platform->clear({reinterpret_cast<std::byte*>(spoiled), sizeof *spoiled}, queue);
}

// Before a step that uses the tensor, or what it kept, elsewhere.
void StateStore::settle(TensorState& state) {
  if (!home_->on_device()) return settle_on_cpu(state, state.sound);
  TensorState* const one[] = {&state};
  if (state.used) settle_on_device(one, state.spoiled, step_ == 0);
}

std::shared_ptr<TensorState> StateStore::use(const std::string& key, const Layout& layout,
                                             const FeedbackSettings& settings, const Plan& plan,
                                             std::uint64_t step,
                                             const std::shared_ptr<const Platform>& platform,
                                             Queue& queue) {
  const std::lock_guard lock(mutex_);
  move_to(platform);
  in_use_ = true;
  if (step != step_) end_step();
  step_ = step;
  const auto found = tensors_.find(key);
  auto state = found == tensors_.end() ? nullptr : found->second;
  if (state) settle(*state);
  std::size_t count = 0;
  for (const auto part : plan.args().counts)
    count += plan.args().collective == Collective::kAllReduce
                 ? part
                 : padded(part, residual_granularity(settings.type));
  const auto kind = kind_of_sender(plan);
  const bool known = state && state->layout == layout;
  if (!known) {
    if (state && !(state->owner.empty() && (kind.empty() || state->sender.empty()))) ++resets_;
    state = std::make_shared<TensorState>();
    state->key = key;
    state->layout = layout;
  }
  bool changed = renew(state->sender, settings.sender, settings, count, kind);
  changed |= renew(state->owner, settings.owner, settings, plan.owned(), kind_of_owner(plan));
  if (!known) {
    if (settings.sender && kind.empty()) take_over(*state);
    put(state);
  }
  if (changed || !known) count_bytes();
  state->used = true;
  if (!home_->on_device()) return state;
  const auto& memory = state->sender.empty() ? state->owner : state->sender;
  if (step != 0)
    state->spoiled = reinterpret_cast<std::uint32_t*>(home_->spoiled.get());
  else
    state->spoiled = memory.empty() ? nullptr : memory.words() + 1;
  queue.wait(*home_->queue->record());
  return state;
}

// Whether the memory is another now.
bool StateStore::renew(ResidualMemory& memory, bool wanted, const FeedbackSettings& settings,
                       std::size_t count, const std::string& kind) {
  if (wanted ? memory.holds(settings.type, count, kind) : memory.empty()) return false;
  if (!memory.empty()) ++resets_;
  memory = {};
  if (wanted) memory.begin(settings.type, count, kind, home_);
  return true;
}

// Collects the residuals of its parameters from where they were.
void StateStore::take_over(TensorState& state) {
  std::vector<float> values(state.sender.count());
  std::map<const TensorState*, SavedResidual> known;
  std::size_t first = 0;
  bool moved = false;
  for (const auto& [name, count] : state.layout.pieces) {
    if (const auto found = pieces_.find(name); found != pieces_.end()) {
      auto& [old, at, length] = found->second;
      settle(*old);
      const auto& sender = old->sender;
      if (length == count && sender.kind().empty() && at + count <= sender.count()) {
        const auto [content, begins] = known.try_emplace(old.get());
        if (begins) content->second = saved(sender);
        read(content->second, at, count, values.data() + first);
        moved = true;
      } else if (!sender.empty()) {
        ++resets_;
      }
    }
    first += count;
  }
  if (!moved) return;
  state.sender.replace(values);
  ++moves_;
}

// As the place of its parameters. A tensor all of whose parameters went elsewhere is forgotten.
void StateStore::put(const std::shared_ptr<TensorState>& state) {
  tensors_[state->key] = state;
  state->pieces = state->layout.pieces.size();
  std::size_t first = 0;
  for (const auto& [name, count] : state->layout.pieces) {
    auto& place = pieces_[name];
    if (auto& old = place.state; old && --old->pieces == 0) {
      const auto entry = tensors_.find(old->key);
      if (entry != tensors_.end() && entry->second == old) tensors_.erase(entry);
    }
    place = {state, first, count};
    first += count;
  }
}

Prediction StateStore::predict(TensorState& state, ConstValues like, std::uint64_t engine,
                               Queue& queue) {
  const std::lock_guard lock(mutex_);
  auto& known = state.prediction;
  if (known.engine != engine || known.values.count != like.count ||
      known.values.dtype != like.dtype) {
    known = {};
    known.home = home_;
    known.memory = home_->allocator->allocate(std::max<std::size_t>(like.bytes(), 1));
    known.values = {known.memory.get(), like.count, like.dtype};
    known.engine = engine;
    if (home_->on_device()) queue.wait(*home_->queue->record());
    count_bytes();
  }
  return {known.values, known.number++};
}

void StateStore::succeeded(TensorState& state) {
  const std::lock_guard lock(mutex_);
  state.sound = true;
}

// A step that was not sound in one tensor is skipped as a whole: an optimizer takes all of its
// gradients or none.
void StateStore::end_step() {
  if (home_->on_device()) {
    std::vector<TensorState*> used;
    for (const auto& [_, state] : tensors_)
      if (state->used) used.push_back(state.get());
    if (step_ != 0 && !used.empty()) settle_on_device(used, used.front()->spoiled, true);
    for (auto* const state : used) settle(*state);
    return;
  }
  bool sound = true;
  if (step_ != 0)
    for (const auto& [_, state] : tensors_)
      if (state->used) sound &= state->sound;
  for (const auto& [_, state] : tensors_) settle_on_cpu(*state, sound && state->sound);
}

void StateStore::reset() {
  const std::lock_guard lock(mutex_);
  end_step();  // so that no work is left that uses it
  in_use_ = false;
  tensors_.clear();
  pieces_.clear();
  step_ = 0;
  count_bytes();
}

std::vector<SavedState> StateStore::save() {
  const std::lock_guard lock(mutex_);
  end_step();
  return save_all();
}

std::vector<SavedState> StateStore::save_all() {
  std::vector<SavedState> all;
  std::set<const TensorState*> seen;
  for (const auto& [_, place] : pieces_) {
    const auto& state = *place.state;
    if (!seen.insert(&state).second) continue;
    all.push_back({state.key, state.layout, saved(state.sender), saved(state.owner)});
  }
  return all;
}

void StateStore::load(const std::vector<std::vector<SavedState>>& ranks) {
  const std::lock_guard lock(mutex_);
  end_step();
  load_all(ranks);
  in_use_ = false;
}

void StateStore::load_all(const std::vector<std::vector<SavedState>>& ranks) {
  const auto check_size = [](const SavedResidual& from) {
    if (from.count > from.bytes.size() ||
        from.bytes.size() != residual_bytes(from.type, from.count))
      throw ConfigError("a saved residual of " + std::to_string(from.count) + " values has " +
                        std::to_string(from.bytes.size()) + " bytes instead of " +
                        std::to_string(residual_bytes(from.type, from.count)));
  };
  const auto fill = [&](const SavedResidual& from, ResidualMemory& to) {
    if (from.bytes.empty()) return;
    check_size(from);
    to.begin(from.type, from.count, from.kind, home_);
    to.replace(Bytes(from.bytes));
  };
  const bool folds = ranks.size() > 1;
  std::vector<std::shared_ptr<TensorState>> states;
  for (const auto& saved : ranks.empty() ? std::vector<SavedState>{} : ranks.front()) {
    if (folds && !saved.sender.kind.empty()) continue;  // parts of another number of ranks
    auto& state = states.emplace_back(std::make_shared<TensorState>());
    state->key = saved.key;
    state->layout = saved.layout;
    fill(saved.sender, state->sender);
    if (!folds) fill(saved.owner, state->owner);
    if (!folds || state->sender.empty()) continue;
    std::vector<float> sum(state->sender.count()), one(state->sender.count());
    for (const auto& rank : ranks) {
      const auto same = std::ranges::find(rank, saved.key, &SavedState::key);
      if (same == rank.end() || same->layout != saved.layout ||
          same->sender.count != saved.sender.count)
        throw ConfigError("the saved states of ranks differ at '" + saved.key +
                          "': load those of one and the same step");
      check_size(same->sender);
      read(same->sender, 0, one.size(), one.data());
      for (std::size_t i = 0; i < sum.size(); ++i)
        sum[i] += one[i] / static_cast<float>(ranks.size());
    }
    state->sender.replace(sum);
  }
  tensors_.clear();
  pieces_.clear();
  step_ = 0;
  for (const auto& state : states) put(state);
  count_bytes();
}

void StateStore::count_bytes() {
  std::set<const TensorState*> seen;
  std::size_t bytes = 0;
  for (const auto& [_, place] : pieces_)
    if (seen.insert(place.state.get()).second)
      bytes += place.state->sender.bytes() + place.state->owner.bytes() +
               place.state->prediction.bytes();
  kept_bytes += bytes - bytes_;
  bytes_ = bytes;
}

std::size_t StateStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::uint64_t StateStore::resets() const {
  const std::lock_guard lock(mutex_);
  return resets_;
}

std::uint64_t StateStore::moves() const {
  const std::lock_guard lock(mutex_);
  return moves_;
}

std::size_t StateStore::process_bytes() { return kept_bytes; }

}  // namespace cccl
