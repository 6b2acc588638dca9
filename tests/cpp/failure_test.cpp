#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

#include "collectives/agreement.h"
#include "failures.h"
#include "support.h"
#include "transports/loopback/loopback.h"

namespace cccl::testing {
namespace {

using namespace std::chrono_literals;

Setup setup_of(const std::string& codec) {
  Setup setup;
  setup.contribution = setup.result = make_codec(codec);
  setup.tuning = {1, 0, Algorithm::kTwoShot};  // many small chunks
  return setup;
}

// A group whose rank `which` has the hooks.
Group bent_group(int size, int which, Bent::Hooks hooks, Seconds deadline = Group::kDeadline) {
  auto transports = make_loopback(size);
  transports[which] = std::make_shared<Bent>(transports[which], std::move(hooks));
  return Group(std::move(transports), deadline);
}

struct Difference {
  const char* name;
  std::function<void(CollectiveCall&)> make;
};

void shorten(CollectiveCall& call) { --call.in.count, --call.out.count; }

void become_half(CollectiveCall& call) { call.in.dtype = call.out.dtype = DType::kFloat16; }

class Mismatch : public ::testing::TestWithParam<Difference> {};

TEST_P(Mismatch, OfOneRankIsNamedOnEveryRankAtOnceAndTheGroupGoesOn) {
  constexpr int kWorld = 3;
  Group group(kWorld);
  const auto setup = setup_of("block_float8");
  auto round = group.round(setup, DType::kFloat32, 2000);
  std::vector<CollectiveCall> calls;
  for (int rank = 0; rank < kWorld; ++rank) calls.push_back(round.call(rank));
  GetParam().make(calls[1]);
  const auto begun = std::chrono::steady_clock::now();
  const auto errors = group.attempt(calls);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, Group::kDeadline / 4);
  for (int rank = 0; rank < kWorld; ++rank) {
    EXPECT_TRUE(is<MismatchError>(errors[rank])) << message_of(errors[rank]);
    EXPECT_EQ(message_of(errors[rank]), message_of(errors[0]));
    EXPECT_TRUE(rank == 1 || all_nan(round.out[rank]));
  }
  EXPECT_NE(message_of(errors[0]).find("rank 1 has"), std::string::npos) << message_of(errors[0]);

  auto next = group.round(setup, DType::kFloat32, 2000);
  ASSERT_NO_THROW(group.run(next));
  for (const auto& out : next.out) EXPECT_TRUE(out.same_bits(next.out[0]) && !all_nan(out));
}

INSTANTIATE_TEST_SUITE_P(
    Of, Mismatch,
    ::testing::Values(
        Difference{"Count", shorten}, Difference{"DType", become_half},
        Difference{"Op", [](CollectiveCall& call) { call.average = false; }},
        Difference{"Root", [](CollectiveCall& call) { call.root = 2; }},
        Difference{"Checks", [](CollectiveCall& call) { call.checksum = false; }},
        Difference{"Window", [](CollectiveCall& call) { call.tuning.window = 5; }},
        Difference{"Chunk", [](CollectiveCall& call) { call.tuning.chunk_bytes = 1 << 20; }},
        Difference{"Algorithm",
                   [](CollectiveCall& call) { call.tuning.algorithm = Algorithm::kOneShot; }},
        Difference{"Collective",
                   [](CollectiveCall& call) { call.collective = Collective::kBroadcast; }},
        Difference{"Codec", [](CollectiveCall& call) { call.result = make_codec("block_float4"); }},
        Difference{"CodecOption",
                   [](CollectiveCall& call) {
                     call.result = make_codec("block_float8", {{"block_size", std::int64_t{64}}});
                   }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(DifferentSeeds, NeverGiveDifferentBits) {
  for (const auto algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
    Group group(3);
    auto setup = setup_of("block_float4");
    setup.contribution = setup.result = make_codec("block_float4", {{"rounding", "stochastic"}});
    setup.tuning.algorithm = algorithm;
    auto round = group.round(setup, DType::kFloat32, 2000);
    std::vector<CollectiveCall> calls;
    for (int rank = 0; rank < 3; ++rank) {
      calls.push_back(round.call(rank));
      calls.back().seed = rank;
    }
    const auto errors = group.attempt(calls);
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_TRUE(is<MismatchError>(errors[rank]) || round.out[rank].same_bits(round.out[0]))
          << name_of(algorithm) << ", rank " << rank;
  }
}

TEST(DamagedPayload, IsATypedErrorAndNanOnEveryRank) {
  for (const int message : {0, 3, 11}) {
    int received = 0;
    Bent::Hooks hooks;
    hooks.received = [&](const Transfer& transfer) {
      if (transfer.bytes != sizeof(Signature) && received++ == message)
        transfer.data[transfer.bytes / 2] ^= std::byte{4};
    };
    auto group = bent_group(3, 1, hooks);
    auto round = group.round(setup_of("block_float8"), DType::kFloat32, 5000);
    const auto errors = group.attempt(round);
    EXPECT_TRUE(is<CorruptPayloadError>(errors[1])) << message_of(errors[1]);
    for (const int rank : {0, 2}) {
      EXPECT_TRUE(is<PeerAbortedError>(errors[rank])) << message_of(errors[rank]);
      EXPECT_NE(message_of(errors[rank]).find("rank 1"), std::string::npos);
    }
    expect_typed_errors_and_nan(round, errors);
  }
}

TEST(RankThatDiesMidway, IsATypedErrorAndNanOnEveryRank) {
  for (const int post : {0, 1, 7}) {
    int posts = 0;
    Bent::Hooks hooks;
    hooks.before_post = [&](std::span<Transfer>) {
      if (posts++ == post) throw TransportError("the cable is cut");
    };
    auto group = bent_group(3, 2, hooks);
    auto round = group.round(setup_of("block_float8"), DType::kFloat32, 5000);
    const auto errors = group.attempt(round);
    expect_typed_errors_and_nan(round, errors);
    for (const auto& error : errors)
      EXPECT_NE(message_of(error).find("the cable is cut"), std::string::npos);
  }
}

TEST(AbortedGroup, FailsWhatIsPendingAndRefusesWhatComes) {
  Group group(3);
  auto round = group.round(setup_of("block_float8"), DType::kFloat32, 5000);
  std::vector<std::shared_ptr<Work>> works;
  for (const int rank : {0, 1, 0, 1}) works.push_back(group.rank(rank).submit(round.call(rank)));
  std::this_thread::sleep_for(20ms);
  group.rank(2).abort("told to");
  for (const auto& work : works) {
    EXPECT_THROW(work->wait(Seconds{20}), TransportError);
    EXPECT_NE(message_of(work->error()).find("told to"), std::string::npos);
  }
  for (const int rank : {0, 1}) EXPECT_TRUE(all_nan(round.out[rank]));
  for (const int rank : {0, 1, 2})
    EXPECT_THROW(group.rank(rank).submit(round.call(rank)), ClosedError);
}

TEST(Abort, FromAnotherThreadAtAnyMomentEndsEveryRankInTime) {
  for (int i = 0; i < 40; ++i) {
    Group group(3);
    auto round = group.round(setup_of("block_float4"), DType::kFloat32, 20000);
    std::thread aborter([&] {
      std::this_thread::sleep_for(i * 50us);
      group.rank(i % 3).abort("at any moment");
    });
    std::vector<std::exception_ptr> errors;
    try {
      errors = group.attempt(round);
    } catch (const ClosedError&) {  // aborted before all ranks had submitted
    }
    aborter.join();
    for (int rank = 0; rank < 3; ++rank) group.close(rank);  // before `round` goes
    for (std::size_t rank = 0; rank < errors.size(); ++rank)
      EXPECT_TRUE(errors[rank] ? is<TransportError>(errors[rank]) && all_nan(round.out[rank])
                               : !all_nan(round.out[rank]));
  }
}

TEST(AbsentRank, MeetsTheDeadlineAndIsNamed) {
  Group group(3, Seconds{0.2});
  auto round = group.round(setup_of("block_float8"), DType::kFloat32, 5000);
  const auto begun = std::chrono::steady_clock::now();
  std::vector<std::shared_ptr<Work>> works;
  for (const int rank : {0, 1}) works.push_back(group.rank(rank).submit(round.call(rank)));
  std::string messages;
  for (const int rank : {0, 1}) {
    EXPECT_THROW(works[rank]->wait(Seconds{20}), TransportError);
    EXPECT_TRUE(all_nan(round.out[rank]));
    EXPECT_NE(message_of(works[rank]->error()).find("for rank 2"), std::string::npos)
        << message_of(works[rank]->error());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
}

// The peer posts while this rank gives up: nothing may be written to memory that is gone.
TEST(LateRank, DoesNotWriteIntoMemoryOfARankThatGaveUp) {
  std::function<void()> peer_comes;
  Bent::Hooks hooks;
  hooks.before_abort = [&] { peer_comes(); };
  auto group = bent_group(2, 0, hooks, Seconds{0.1});
  auto round = group.round(setup_of("block_float8"), DType::kFloat32, 5000);
  std::shared_ptr<Work> late;
  peer_comes = [&] {
    if (late) return;
    late = group.rank(1).submit(round.call(1));
    std::this_thread::sleep_for(30ms);
  };
  EXPECT_THROW(group.rank(0).submit(round.call(0))->wait(Seconds{20}), DeadlineError);
  ASSERT_TRUE(late);
  EXPECT_THROW(late->wait(Seconds{20}), TransportError);
}

TEST(Submit, RefusesImpossibleCallsBeforeAnythingIsSent) {
  Group group(2);
  const auto good = setup_of("block_float8");
  auto round = group.round(good, DType::kFloat32, 100);
  const auto refuses = [&]<class Expected>(const std::function<void(CollectiveCall&)>& spoil,
                                           const Expected*) {
    auto call = round.call(0);
    spoil(call);
    EXPECT_THROW(group.rank(0).submit(call), Expected);
  };
  const ConfigError* config = nullptr;
  const UnsupportedError* unsupported = nullptr;
  refuses([](CollectiveCall& call) { --call.out.count; }, config);
  refuses([](CollectiveCall& call) { call.counts = {50, 50}; }, config);
  refuses([](CollectiveCall& call) { call.result.reset(); }, config);
  refuses([](CollectiveCall& call) { call.collective = Collective::kAllGather; }, config);
  refuses([](CollectiveCall& call) { call.in.dtype = DType::kInt32; }, unsupported);
  refuses([](CollectiveCall& call) { call.out.dtype = DType::kFloat64; }, unsupported);
  ASSERT_NO_THROW(group.run(round));
}

}  // namespace
}  // namespace cccl::testing
