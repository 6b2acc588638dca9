// The pipeline over a transport of groups, as NCCL is one: of payloads whose values decide how long
// they are, both ends name the same bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/agreement.h"
#include "devices/cpu/platform.h"
#include "devices/cpu/queue.h"
#include "failures.h"
#include "groups.h"
#include "scheduler/sizes.h"
#include "support.h"

namespace cccl::testing {
namespace {

using namespace std::chrono_literals;

constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduceScatter,
                                       Collective::kAllGather, Collective::kBroadcast,
                                       Collective::kSend};

std::vector<CollectiveCall> calls_of(Group::Round& round) {
  std::vector<CollectiveCall> calls;
  const int size = static_cast<int>(round.in.size());
  for (int rank = 0; rank < size; ++rank) {
    calls.push_back(round.call(rank));
    if (round.setup.collective == Collective::kSend && rank == round.setup.root)
      calls.back().out.count = 0;
  }
  return calls;
}

struct Traffic {
  std::uint64_t sent = 0, received = 0, messages = 0;
  bool operator==(const Traffic&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Traffic& traffic) {
  return out << traffic.sent << " sent, " << traffic.received << " received in "
             << traffic.messages;
}

// Runs the round and returns what it moved.
Traffic run(Group& group, Group::Round& round) {
  process_stats().reset();
  for (const auto& error : group.attempt(calls_of(round)))
    if (error) std::rethrow_exception(error);
  Traffic traffic;
  for (const auto& [key, row] : process_stats().rows()) {
    traffic.sent += row.run.bytes_sent;
    traffic.received += row.run.bytes_received;
    traffic.messages += row.run.messages;
  }
  return traffic;
}

// The same call over loopback, where a message may be shorter than its receive: the same bits and
// the same bytes moved.
void expect_as_over_loopback(int world, const Setup& setup, DType dtype, std::size_t count,
                             std::uint64_t seed) {
  Group singly(world), grouped(make_groups(world), Group::kDeadline);
  auto expected = singly.round(setup, dtype, count, seed);
  auto found = grouped.round(setup, dtype, count, seed);
  const auto traffic = run(singly, expected);
  ASSERT_EQ(run(grouped, found), traffic);
  ASSERT_EQ(traffic.sent, traffic.received);
  for (int rank = 0; rank < world; ++rank)
    ASSERT_TRUE(found.out[rank].same_bits(expected.out[rank])) << "rank " << rank;
}

std::string describe(const Setup& setup, DType dtype, std::size_t count) {
  return std::string(name_of(setup.collective)) + " of " + std::to_string(count) + " " +
         name_of(dtype) + ", " + setup.contribution->spec() + " -> " + setup.result->spec() +
         ", root " + std::to_string(setup.root) + ", chunk " +
         std::to_string(setup.tuning.chunk_bytes) + ", window " +
         std::to_string(setup.tuning.window);
}

class Grouped : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(Grouped, GivesTheBitsAndMovesTheBytesOfLoopback) {
  const auto& [codec, world] = GetParam();
  std::uint64_t seed = 0;
  for (const auto collective : kCollectives) {
    if (collective == Collective::kSend && world == 1) continue;
    for (const auto dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64})
      for (const std::size_t count : {0, 1, 33, 4097, 65537})
        for (const std::size_t window : {1, 2, 3}) {
          if (count != 65537 && window != 2) continue;
          auto setup = setup_of(collective, codec, codec);
          setup.root = static_cast<int>(++seed % world);
          setup.tuning = {32768, window, {}};  // what is left open depends on the transport
          SCOPED_TRACE(describe(setup, dtype, count));
          expect_as_over_loopback(world, setup, dtype, count, seed);
          if (HasFatalFailure()) return;
        }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Grouped,
                         ::testing::Combine(::testing::Values("lossless", "sparse",
                                                              "sparse(block_float8)",
                                                              "block_float8", "identity"),
                                            ::testing::Values(1, 2, 3, 5)),
                         [](const auto& info) {
                           auto name = std::get<0>(info.param);
                           std::erase_if(name, [](char c) { return !std::isalnum(c); });
                           return name + "On" + std::to_string(std::get<1>(info.param)) + "Ranks";
                         });

// Legs of which the one has a size that is known and the other has not, any shape of tensor.
TEST(AnyCall, GivesTheBitsAndMovesTheBytesOfLoopback) {
  std::mt19937 random(20261130);
  const auto any = [&](auto... values) {
    const std::common_type_t<decltype(values)...> all[] = {values...};
    return all[random() % std::size(all)];
  };
  for (int i = 0; i < 150; ++i) {
    const int world = any(2, 3, 4, 5);
    const auto codec = [&] {
      return std::string(any("lossless", "sparse", "sparse(block_float8)", "block_float4"));
    };
    auto setup = setup_of(kCollectives[random() % std::size(kCollectives)], codec(), codec());
    setup.root = static_cast<int>(random() % world);
    setup.average = any(true, false);
    setup.tuning = {
        any(std::size_t{1}, std::size_t{9000}, std::size_t{70000}, std::size_t{1} << 20),
        any(std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{4}),
        {}};
    if (setup.collective == Collective::kAllReduce)
      setup.tuning.algorithm = any(Algorithm::kOneShot, Algorithm::kTwoShot);
    const auto dtype = any(DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64);
    const std::size_t count = random() % any(2u, 100u, 5000u, 40000u);
    SCOPED_TRACE("call " + std::to_string(i) + ": " + describe(setup, dtype, count));
    expect_as_over_loopback(world, setup, dtype, count, random());
    if (HasFatalFailure()) return;
  }
}

// Groups are counted over collectives, of which some have sizes and some have none.
TEST(ManyCalls, KeepRanksInStep) {
  constexpr int kWorld = 3;
  Group group(make_groups(kWorld), Group::kDeadline);
  std::vector<Group::Round> rounds;
  std::vector<std::shared_ptr<Work>> works;
  rounds.reserve(60);
  for (int i = 0; i < 60; ++i) {
    const char* const codec = i % 3 == 0 ? "identity" : i % 3 == 1 ? "lossless" : "sparse";
    auto setup = setup_of(kCollectives[i % 4], codec, codec);
    setup.root = i % kWorld;
    setup.tuning.chunk_bytes = 4096;
    rounds.push_back(group.round(setup, DType::kFloat32, i * 331 % 7000, i));
    for (int rank = 0; rank < kWorld; ++rank)
      works.push_back(group.rank(rank).submit(rounds.back().call(rank)));
  }
  for (const auto& work : works) ASSERT_TRUE(work->wait(Seconds{60}));
  Group singly(kWorld);
  for (const auto& round : rounds) {
    auto expected = round;
    ASSERT_NO_THROW(singly.run(expected));
    for (int rank = 0; rank < kWorld; ++rank)
      ASSERT_TRUE(round.out[rank].same_bits(expected.out[rank]));
  }
}

// A payload that no value shortens has all its bytes, one of zeros hardly any, side by side.
TEST(Densities, OfEachRankAreItsOwn) {
  for (const auto collective : kCollectives) {
    const int world = 4;
    Group singly(world), grouped(make_groups(world), Group::kDeadline);
    auto setup = setup_of(collective, "sparse", "sparse");
    setup.tuning.chunk_bytes = 16384;
    auto expected = singly.round(setup, DType::kFloat32, 30011);
    for (int rank = 0; rank < world; ++rank) {
      const auto count = expected.in[rank].count();
      std::vector<double> values(count);
      for (std::size_t i = 0; i < count; ++i)
        values[i] = rank == 0 || (rank == 1 && i % 7 == 0) || (rank == 2 && i > count / 2) ? i : 0;
      expected.in[rank] = Array(DType::kFloat32, values);
    }
    auto found = expected;
    ASSERT_EQ(run(grouped, found), run(singly, expected)) << name_of(collective);
    for (int rank = 0; rank < world; ++rank)
      ASSERT_TRUE(found.out[rank].same_bits(expected.out[rank])) << name_of(collective);
  }
}

// It would write a later chunk's size where an earlier one's is yet to be read.
TEST(Sender, DoesNotRunSoFarAheadOfALateReceiverThatSizesAreMixedUp) {
  Group group(make_groups(2, true), Group::kDeadline);
  auto setup = setup_of(Collective::kSend, "lossless", "lossless");
  setup.tuning = {1 << 14, 1, {}};
  auto round = group.round(setup, DType::kFloat32, 100'000);
  std::vector<double> values(100'000);  // harder to shorten from chunk to chunk
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::ldexp(1.0, static_cast<int>(i * 7919 % (1 + i / 4096)));
  round.in[0] = Array(DType::kFloat32, values);
  for (const bool late : {false, true}) {  // at first ranks agree, and so wait for each other
    auto calls = calls_of(round);
    const auto sent = group.rank(0).submit(calls[0]);
    if (late) std::this_thread::sleep_for(50ms);
    const auto received = group.rank(1).submit(calls[1]);
    ASSERT_TRUE(received->wait(Seconds{20}));
    ASSERT_TRUE(sent->wait(Seconds{20}));
    ASSERT_TRUE(round.out[1].same_bits(round.in[0]));
  }
}

Group bent_group(int size, int which, Bent::Hooks hooks, Seconds deadline = Group::kDeadline) {
  auto transports = make_groups(size);
  transports[which] = std::make_shared<Bent>(transports[which], std::move(hooks));
  return Group(std::move(transports), deadline);
}

Group::Round small_chunks(const Group& group) {
  auto setup = setup_of(Collective::kAllReduce, "lossless", "lossless");
  setup.tuning = {1 << 12, 0, Algorithm::kTwoShot};
  return group.round(setup, DType::kFloat32, 60000);
}

TEST(DamagedPayload, IsATypedErrorAndNanOnEveryRank) {
  for (const int message : {0, 3, 11}) {
    int received = 0;
    Bent::Hooks hooks;
    hooks.received = [&](const Transfer& transfer) {
      const bool payload =
          transfer.bytes > sizeof(std::uint64_t) && transfer.bytes != sizeof(Signature);
      if (payload && received++ == message) transfer.data[transfer.bytes / 2] ^= std::byte{4};
    };
    auto group = bent_group(3, 1, hooks);
    auto round = small_chunks(group);
    const auto errors = group.attempt(round);
    EXPECT_TRUE(is<CorruptPayloadError>(errors[1])) << message_of(errors[1]);
    expect_typed_errors_and_nan(round, errors);
  }
}

// The ends then name different bytes, which this transport tells at once and NCCL at the deadline.
// However large, a size is not believed beyond the buffer.
TEST(DamagedSize, IsATypedErrorAndNanOnEveryRank) {
  for (const int bit : {3, 62})
    for (const int message : {0, 5}) {
      int received = 0;
      Bent::Hooks hooks;
      hooks.received = [&](const Transfer& transfer) {
        if (transfer.bytes == sizeof(std::uint64_t) && received++ == message)
          transfer.data[bit / 8] ^= std::byte{1} << bit % 8;
      };
      auto group = bent_group(3, 1, hooks);
      auto round = small_chunks(group);
      expect_typed_errors_and_nan(round, group.attempt(round));
    }
}

TEST(RankThatDies, BetweenSizesAndPayloadsIsATypedErrorAndNanOnEveryRank) {
  for (const int step : {0, 1, 6}) {
    int steps = 0;
    Bent::Hooks hooks;
    hooks.after_sizes = [&] {
      if (steps++ == step) throw TransportError("the cable is cut");
    };
    auto group = bent_group(3, 2, hooks);
    auto round = small_chunks(group);
    const auto errors = group.attempt(round);
    expect_typed_errors_and_nan(round, errors);
    for (const auto& error : errors)
      EXPECT_NE(message_of(error).find("the cable is cut"), std::string::npos);
  }
}

TEST(RankThatStops, BetweenSizesAndPayloadsMeetsTheDeadline) {
  Bent::Hooks hooks;
  std::atomic<bool> over{false};
  hooks.after_sizes = [&] {
    while (!over) std::this_thread::sleep_for(1ms);
  };
  auto group = bent_group(3, 2, hooks, Seconds{0.2});
  auto round = small_chunks(group);
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < 3; ++rank) works.push_back(group.rank(rank).submit(round.call(rank)));
  for (const int rank : {0, 1}) {
    EXPECT_THROW(works[rank]->wait(Seconds{20}), TransportError);
    EXPECT_TRUE(all_nan(round.out[rank]));
  }
  over = true;
  EXPECT_THROW(works[2]->wait(Seconds{20}), TransportError);
}

// A queue whose work ends when the test says so, as a device's does.
class Pending final : public Queue {
 public:
  std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(false);

  struct Point final : Event {
    explicit Point(std::shared_ptr<std::atomic<bool>> reached) : reached(std::move(reached)) {}
    bool done() const override { return *reached; }
    void synchronize() override {}
    double seconds_since(const Event&) const override { return 0; }
    std::shared_ptr<std::atomic<bool>> reached;
  };

  Device device() const override { return {}; }
  std::unique_ptr<Event> record(bool = false) override { return std::make_unique<Point>(done); }
  void wait(const Event&) override {}
  void synchronize() override {}
  void* native() const override { return nullptr; }
};

struct Payload {
  explicit Payload(std::uint64_t body) : bytes(sizeof(PayloadHeader) + 1000) {
    PayloadHeader header;
    header.body_bytes = body;
    write_header(bytes, header);
  }
  Transfer transfer(Direction direction, int peer) {
    return {direction, bytes.data(), bytes.size(), peer, 0};
  }
  std::vector<std::byte> bytes;
};

// Rank 0 of two has sent a payload; what it waits for, the test decides.
struct OneSent {
  std::vector<std::shared_ptr<Transport>> ranks = make_groups(2);
  std::shared_ptr<const Platform> platform = cpu_platform();
  Payload payload{10};
  std::vector<Transfer> sent{payload.transfer(Direction::kSend, 1)};
  Pending queue, earlier;

  void learn(Seconds deadline, std::vector<std::shared_ptr<Event>> before = {}) {
    learn_sizes(sent, std::vector<std::size_t>{0},
                {*ranks[0], *platform, queue, deadline, std::move(before)});
  }
};

TEST(Sizes, AreLearnedByBothEndsAndNeverBeyondTheBuffer) {
  const auto ranks = make_groups(2);
  const auto platform = cpu_platform();
  CpuQueue queue;
  Payload small(10), damaged(~std::uint64_t{0}), fixed(7), first(0), second(0), third(0);
  std::vector<Transfer> sent{small.transfer(Direction::kSend, 1),
                             fixed.transfer(Direction::kSend, 1),
                             damaged.transfer(Direction::kSend, 1)};
  std::vector<Transfer> wanted{first.transfer(Direction::kReceive, 0),
                               third.transfer(Direction::kReceive, 0),
                               second.transfer(Direction::kReceive, 0)};
  const std::vector<std::size_t> open{0, 2};
  // The sender comes back though nobody receives yet.
  learn_sizes(sent, open, {*ranks[0], *platform, queue, Seconds{5}, {}});
  learn_sizes(wanted, open, {*ranks[1], *platform, queue, Seconds{5}, {}});
  for (const auto* transfers : {&sent, &wanted}) {
    EXPECT_EQ((*transfers)[0].bytes, sizeof(PayloadHeader) + 10);
    EXPECT_EQ((*transfers)[1].bytes, fixed.bytes.size());
    EXPECT_EQ((*transfers)[2].bytes, damaged.bytes.size());
  }
}

TEST(Sizes, MeetTheDeadlineWhichCountsFromWhenEarlierWorkIsDone) {
  OneSent one;
  EXPECT_THROW(one.learn(Seconds{0.05}), DeadlineError);
  const auto begun = std::chrono::steady_clock::now();
  std::thread worker([&] {
    std::this_thread::sleep_for(200ms);
    *one.queue.done = true;
    *one.earlier.done = true;
  });
  one.learn(Seconds{0.05}, {one.earlier.record()});
  worker.join();
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 200ms);
}

TEST(Sizes, AreGivenUpWhereARankIsLostMeanwhile) {
  OneSent one;
  std::thread peer([&] {
    std::this_thread::sleep_for(50ms);
    one.ranks[1]->abort("enough");
  });
  for (const bool waits_for_earlier : {true, false}) {
    *one.earlier.done = !waits_for_earlier;
    EXPECT_THROW(one.learn(Seconds{20}, {one.earlier.record()}), PeerAbortedError);
  }
  peer.join();
}

}  // namespace
}  // namespace cccl::testing
