#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "collectives/communicator.h"
#include "devices/cpu/workers.h"
#include "support.h"

namespace cccl::testing {
namespace {

constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduceScatter,
                                       Collective::kAllGather, Collective::kBroadcast};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Setup setup_of(Collective collective, std::shared_ptr<const Codec> codec) {
  Setup setup;
  setup.collective = collective;
  setup.contribution = setup.result = std::move(codec);
  return setup;
}

bool gives_all_ranks_the_same(Collective collective) {
  return collective != Collective::kReduceScatter;
}

// The output of the whole tensor: any rank's, or where ranks hold parts, the parts in order.
std::vector<double> whole_output(const Group::Round& round) {
  std::vector<double> whole;
  for (const auto& out : round.out) {
    const auto part = out.values();
    whole.insert(whole.end(), part.begin(), part.end());
    if (gives_all_ranks_the_same(round.setup.collective)) break;
  }
  return whole;
}

void expect_same_bits_on_all_ranks(const Group::Round& round) {
  if (!gives_all_ranks_the_same(round.setup.collective)) return;
  for (std::size_t rank = 1; rank < round.out.size(); ++rank)
    ASSERT_TRUE(round.out[rank].same_bits(round.out[0])) << "rank " << rank << " differs";
}

void expect_within_stated_error(const Group::Round& round) {
  const auto expected = expected_of(round);
  const auto found = whole_output(round);
  ASSERT_EQ(found.size(), expected.exact.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    ASSERT_LE(std::abs(found[i] - expected.exact[i]), expected.tolerance[i])
        << "value " << i << " is " << found[i] << " instead of " << expected.exact[i];
}

std::string describe(const Setup& setup, DType dtype, std::size_t count) {
  return std::string(name_of(setup.collective)) + " of " + std::to_string(count) + " " +
         name_of(dtype) + (setup.average ? ", avg" : ", sum");
}

class EveryCodec : public ::testing::TestWithParam<std::tuple<std::shared_ptr<const Codec>, int>> {
 protected:
  std::shared_ptr<const Codec> codec_ = std::get<0>(GetParam());
  int world_ = std::get<1>(GetParam());
};

TEST_P(EveryCodec, GivesEveryRankTheSameBitsWithinTheStatedError) {
  Group group(world_);
  std::uint64_t seed = 0;
  for (const auto dtype : kFloats) {
    if (!codec_->supports(dtype)) continue;
    for (const auto collective : kCollectives)
      for (const bool average : {true, false})
        for (const std::size_t count : {0, 1, 33, 1000, 65537}) {
          // The large count is there to be cut into chunks, which no dtype does its own way.
          if (count > 1000 && (dtype != DType::kFloat32 || !average)) continue;
          auto setup = setup_of(collective, codec_);
          setup.average = average;
          setup.root = static_cast<int>(++seed % world_);
          if (count > 1000) setup.tuning.chunk_bytes = 32768;
          SCOPED_TRACE(describe(setup, dtype, count));
          auto round = group.round(setup, dtype, count, seed);
          ASSERT_NO_THROW(group.run(round));
          expect_same_bits_on_all_ranks(round);
          expect_within_stated_error(round);
          if (HasFatalFailure()) return;
        }
  }
}

TEST_P(EveryCodec, MakesTheSameBytesWithEveryChunkSizeWindowAndAlgorithm) {
  constexpr std::size_t kCount = 10007;
  const std::vector<Tuning> tunings = {{},
                                       {1, 1, Algorithm::kTwoShot},
                                       {1, 3, Algorithm::kTwoShot},
                                       {8192, 2, Algorithm::kTwoShot},
                                       {1, 0, Algorithm::kOneShot},
                                       {4096, 1, Algorithm::kOneShot},
                                       {1 << 20, 0, Algorithm::kOneShot}};
  for (const auto collective : kCollectives) {
    std::optional<Group::Round> first;
    for (const auto& tuning : tunings) {
      // A group of its own: seeds of stochastic rounding depend on how many calls came before.
      Group group(world_);
      auto setup = setup_of(collective, codec_);
      setup.tuning = tuning;
      auto round = group.round(setup, DType::kFloat32, kCount);
      ASSERT_NO_THROW(group.run(round));
      if (!first)
        first = std::move(round);
      else
        for (int rank = 0; rank < world_; ++rank)
          ASSERT_TRUE(round.out[rank].same_bits(first->out[rank]))
              << name_of(collective) << ", chunk of " << tuning.chunk_bytes << " bytes, window "
              << tuning.window << ", rank " << rank;
    }
  }
}

TEST_P(EveryCodec, SurfacesNonFiniteValuesOfOneRankOnEveryRank) {
  constexpr std::size_t kCount = 1500, kAt = 700;
  Group group(world_);
  for (const auto dtype : kFloats) {
    if (!codec_->supports(dtype)) continue;
    for (const auto collective : {Collective::kAllReduce, Collective::kReduceScatter})
      for (const auto algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot})
        for (const double bad : {kNaN, HUGE_VAL, -HUGE_VAL}) {
          auto setup = setup_of(collective, codec_);
          setup.tuning.algorithm = algorithm;
          SCOPED_TRACE(describe(setup, dtype, kCount) + " with " + std::to_string(bad));
          auto round = group.round(setup, dtype, kCount);
          round.in[world_ - 1].set(kAt, bad);
          ASSERT_NO_THROW(group.run(round));
          expect_same_bits_on_all_ranks(round);
          const auto found = whole_output(round);
          EXPECT_FALSE(std::isfinite(found[kAt])) << found[kAt];
          EXPECT_TRUE(std::isnan(found[kAt]) || !std::isnan(bad));
          EXPECT_TRUE(std::isfinite(found[0])) << "one bad value spoiled others far away";
        }
  }
}

TEST_P(EveryCodec, WorksInPlace) {
  Group group(world_);
  auto setup = setup_of(Collective::kAllReduce, codec_);
  setup.tuning.chunk_bytes = 4096;
  auto apart = group.round(setup, DType::kFloat32, 9001), inside = apart;
  Group other(world_);
  ASSERT_NO_THROW(other.run(apart));
  std::vector<CollectiveCall> calls;
  for (int rank = 0; rank < world_; ++rank) {
    calls.push_back(inside.call(rank));
    calls.back().out = inside.in[rank].view();
  }
  for (const auto& error : group.attempt(calls)) ASSERT_FALSE(error);
  for (int rank = 0; rank < world_; ++rank) EXPECT_TRUE(inside.in[rank].same_bits(apart.out[rank]));
}

INSTANTIATE_TEST_SUITE_P(Of, EveryCodec,
                         ::testing::Combine(::testing::ValuesIn(all_codecs()),
                                            ::testing::Values(1, 2, 3, 5)),
                         [](const auto& info) {
                           return test_name(*std::get<0>(info.param)) + "On" +
                                  std::to_string(std::get<1>(info.param)) + "Ranks";
                         });

TEST(Legs, MayHaveDifferentCodecs) {
  const auto codecs = all_codecs();
  for (const auto& first : codecs)
    for (const auto& second : codecs)
      for (const auto algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
        if (!first->supports(DType::kFloat32) || !second->supports(DType::kFloat32)) continue;
        Group group(3);
        auto setup = setup_of(Collective::kAllReduce, first);
        setup.result = second;
        setup.tuning = {1, 0, algorithm};
        SCOPED_TRACE(first->spec() + " -> " + second->spec());
        auto round = group.round(setup, DType::kFloat32, 3001);
        ASSERT_NO_THROW(group.run(round));
        expect_same_bits_on_all_ranks(round);
        expect_within_stated_error(round);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

// The root's output is not there at all: whatever wrote it would crash.
TEST(Send, GivesTheOthersWhatABroadcastGivesThem) {
  for (const int world : {2, 3})
    for (const std::size_t count : {0, 1, 1000, 65537}) {
      Group sending(world), broadcasting(world);
      auto setup = setup_of(Collective::kBroadcast, make_codec("block_float8"));
      setup.root = world - 1;
      setup.tuning.chunk_bytes = 32768;
      auto expected = broadcasting.round(setup, DType::kFloat32, count);
      ASSERT_NO_THROW(broadcasting.run(expected));
      setup.collective = Collective::kSend;
      auto round = sending.round(setup, DType::kFloat32, count);
      std::vector<CollectiveCall> calls;
      for (int rank = 0; rank < world; ++rank) calls.push_back(round.call(rank));
      calls[setup.root].out = {nullptr, 0, DType::kFloat32};
      for (const auto& error : sending.attempt(std::move(calls))) ASSERT_FALSE(error);
      for (int rank = 0; rank < setup.root; ++rank)
        ASSERT_TRUE(round.out[rank].same_bits(expected.out[rank])) << "rank " << rank;
      ASSERT_TRUE(round.in[setup.root].same_bits(expected.in[setup.root]));
    }
}

TEST(Send, NeedsAReceiverAndNoOutputWhereItBegins) {
  for (const int world : {1, 2}) {
    Group group(world);
    auto round = group.round(setup_of(Collective::kSend, make_codec("identity")), DType::kFloat32,
                             world == 1 ? 0 : 10);
    EXPECT_THROW(group.rank(0).submit(round.call(0)), ConfigError);
  }
}

TEST(Identity, SumsIntegersExactlyInManyRoundsOfMixedSizesAndCollectives) {
  constexpr int kWorld = 3, kRounds = 300;
  Group group(kWorld);
  std::vector<Group::Round> rounds;
  std::vector<std::shared_ptr<Work>> works;
  rounds.reserve(kRounds);
  for (int i = 0; i < kRounds; ++i) {
    auto setup = setup_of(kCollectives[i % 4], make_codec("identity"));
    setup.average = false;
    setup.root = i % kWorld;
    setup.tuning.chunk_bytes = i % 3 ? 0 : 1024;
    const std::size_t count = static_cast<std::size_t>(i) * 37 % 5 * (i * 131 % 1009);
    rounds.push_back(group.round(setup, DType::kFloat32, count));
    for (int rank = 0; rank < kWorld; ++rank) {
      auto values = rounds.back().in[rank].values();
      for (std::size_t at = 0; at < values.size(); ++at)
        values[at] = static_cast<double>((at * 7 + i + rank * 1000) % 4096);
      rounds.back().in[rank] = Array(DType::kFloat32, values);
    }
    for (int rank = 0; rank < kWorld; ++rank)
      works.push_back(group.rank(rank).submit(rounds.back().call(rank)));
  }
  for (const auto& work : works) ASSERT_TRUE(work->wait(Seconds{60}));
  for (const auto& round : rounds) ASSERT_EQ(whole_output(round), expected_of(round).exact);
}

TEST(CodecThreads, ChangeNoBitOfCollectives) {
  constexpr std::size_t kCount = 700'001;
  for (const auto* name : {"block_float4", "lossless"})
    for (const auto collective : {Collective::kAllReduce, Collective::kBroadcast}) {
      std::optional<Group::Round> alone;
      for (const std::size_t threads : {1, 4}) {
        set_codec_threads(threads);
        Group group(2);
        auto round = group.round(setup_of(collective, make_codec(name)), DType::kFloat32, kCount);
        ASSERT_NO_THROW(group.run(round));
        if (!alone)
          alone = std::move(round);
        else
          for (int rank = 0; rank < 2; ++rank)
            EXPECT_TRUE(round.out[rank].same_bits(alone->out[rank])) << name << ", rank " << rank;
      }
    }
  set_codec_threads(0);
}

// In several chunks and pieces, on several threads, with and without one shot.
TEST(Noise, IsReadAlikeByAllRanksAndChangesNoResult) {
  constexpr std::size_t kCount = 700'001;
  auto setup = setup_of(Collective::kAllReduce, make_codec("block_float8"));
  std::optional<Noise> first;
  for (const std::size_t threads : {1, 4})
    for (const auto algorithm : {Algorithm::kTwoShot, Algorithm::kOneShot}) {
      set_codec_threads(threads);
      setup.tuning = {1 << 21, 0, algorithm};
      Group group(3);
      auto plain = group.round(setup, DType::kFloat32, kCount);
      group.run(plain);
      auto round = group.round(setup, DType::kFloat32, kCount);
      std::vector<CollectiveCall> calls;
      for (int rank = 0; rank < 3; ++rank) {
        calls.push_back(round.call(rank));
        calls.back().noise = std::make_shared<Noise>();
      }
      for (const auto& error : group.attempt(calls)) ASSERT_FALSE(error);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(round.out[rank].same_bits(plain.out[rank])) << "rank " << rank;
        const auto& found = *calls[rank].noise;
        if (!first) first = found;
        EXPECT_EQ(found.values, kCount);
        EXPECT_EQ(found.variances, first->variances);
        EXPECT_EQ(found.squares, first->squares);
        EXPECT_GT(found.variances, 0);
      }
    }
  set_codec_threads(0);
}

TEST(AllReduceTraffic, StaysUnderTwiceThePayloadForEveryNumberOfRanks) {
  constexpr std::size_t kCount = 1 << 16;
  const auto codec = make_codec("block_float8");
  const double payload = static_cast<double>(codec->max_encoded_bytes(kCount, DType::kFloat32));
  for (int world = 2; world <= 8; ++world) {
    process_stats().reset();
    Group group(world);
    auto setup = setup_of(Collective::kAllReduce, codec);
    setup.tuning.algorithm = Algorithm::kTwoShot;
    auto round = group.round(setup, DType::kFloat32, kCount);
    group.run(round);
    const auto rows = process_stats().rows();
    ASSERT_EQ(rows.size(), 1);
    const auto headers = 2.0 * world * sizeof(PayloadHeader);
    EXPECT_LE(static_cast<double>(rows[0].second.run.bytes_sent) / world, 2 * payload + headers);
  }
}

TEST(Work, OutlivesItsCommunicatorWhichFinishesWhatWasSubmitted) {
  auto group = std::make_unique<Group>(2);
  auto round =
      group->round(setup_of(Collective::kAllReduce, make_codec("identity")), DType::kFloat32, 5000);
  std::vector<std::shared_ptr<Work>> works;
  for (int rank = 0; rank < 2; ++rank) works.push_back(group->rank(rank).submit(round.call(rank)));
  group.reset();
  for (const auto& work : works) {
    EXPECT_TRUE(work->done());
    EXPECT_TRUE(work->wait());
  }
  expect_within_stated_error(round);
}

TEST(Communicator, MayBeDestroyedIdle) {
  for (int i = 0; i < 50; ++i) Group group(3);
}

TEST(Communicator, MayBeWatchedFromOtherThreads) {
  Group group(2);
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    while (!stop) {
      EXPECT_LT(Pool::process_bytes(), 100'000'000);
      process_stats().rows();
    }
  });
  const auto setup = setup_of(Collective::kAllReduce, make_codec("block_float4"));
  for (int i = 0; i < 20; ++i) {
    auto round = group.round(setup, DType::kFloat32, 20000);
    group.run(round);
  }
  stop = true;
  watcher.join();
}

}  // namespace
}  // namespace cccl::testing
