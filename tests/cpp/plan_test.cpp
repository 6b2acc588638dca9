#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "api/error.h"
#include "plan_simulator.h"
#include "scheduler/plan.h"

namespace cccl::testing {
namespace {

using Counts = std::vector<std::size_t>;

constexpr int kWorlds[] = {1, 2, 3, 5, 7, 8};

bool is_gathered(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather;
}

std::string describe(const PlanArgs& args) {
  std::string counts;
  for (const auto count : args.counts) counts += " " + std::to_string(count);
  return std::string(name_of(args.collective)) + ", " + name_of(args.algorithm) + ", " +
         std::to_string(args.size) + " ranks, root " + std::to_string(args.root) + ", counts" +
         counts + ", chunk " + std::to_string(args.chunk) + ", granularity " +
         std::to_string(args.granularity) + ", window " + std::to_string(args.window) +
         ", receive_ahead " + std::to_string(args.receive_ahead);
}

std::vector<Counts> counts_for(Collective collective, int size) {
  if (!is_gathered(collective)) return {{0}, {1}, {2}, {7}, {31}, {64}, {97}, {128}, {211}};
  std::vector<Counts> all;
  const auto fill = [&](auto&& count_of) {
    Counts counts;
    for (int rank = 0; rank < size; ++rank) counts.push_back(count_of(rank));
    all.push_back(counts);
  };
  fill([](int) { return 0; });
  fill([](int) { return 1; });
  fill([](int) { return 61; });
  fill([](int rank) { return rank % 2 ? 0 : 37; });
  fill([&](int rank) { return rank == size - 1 ? 103 : 0; });
  fill([](int rank) { return 7 * rank % 5 * 13; });
  return all;
}

// Every plan of a collective over the whole grid of sizes.
void for_each_plan(Collective collective, Algorithm algorithm, std::size_t receive_ahead,
                   const std::function<void(const PlanArgs&)>& visit) {
  PlanArgs args;
  args.collective = collective;
  args.algorithm = algorithm;
  args.receive_ahead = receive_ahead;
  for (const int size : kWorlds) {
    if (collective == Collective::kSend && size == 1) continue;  // refused
    const int roots = has_root(collective) ? size : 1;
    for (const auto& counts : counts_for(collective, size))
      for (const std::size_t granularity : {1, 4})
        for (const std::size_t granules : {1, 3, 16})
          for (const std::size_t window : {1, 2, 3})
            for (int root = 0; root < roots; ++root) {
              args.size = size;
              args.root = root;
              args.counts = counts;
              args.granularity = granularity;
              args.chunk = granules * granularity * (granularity == 1 ? 5 : 2);
              args.window = window;
              visit(args);
            }
  }
}

void expect_sound(const PlanArgs& args) {
  try {
    simulate(args);
  } catch (const PlanError& error) {
    FAIL() << describe(args) << "\n  " << error.what();
  }
}

struct Family {
  const char* name;
  Collective collective;
  Algorithm algorithm;
};

class EveryPlan : public ::testing::TestWithParam<std::tuple<Family, std::size_t>> {};

TEST_P(EveryPlan, MovesEveryValueOnceWithoutDeadlockOrEarlyReuse) {
  const auto& [family, receive_ahead] = GetParam();
  for_each_plan(family.collective, family.algorithm, receive_ahead, [](const PlanArgs& args) {
    if (!::testing::Test::HasFailure()) expect_sound(args);
  });
}

// What a step sends from one rank to another, and what the other expects of it in that step.
using Pairs = std::map<std::pair<int, int>, std::vector<std::size_t>>;

// Where both ends of a transfer must be in one group, a step is a group: the same one on all ranks,
// including those that have nothing to move in it.
TEST_P(EveryPlan, MovesWithinOneStepWhatIsNotReceivedAhead) {
  const auto& [family, receive_ahead] = GetParam();
  if (receive_ahead != 0) return;
  for_each_plan(family.collective, family.algorithm, 0, [](PlanArgs args) {
    std::vector<Plan> plans;
    for (args.rank = 0; args.rank < args.size; ++args.rank) plans.emplace_back(args);
    for (std::size_t step = 0; step < plans[0].steps(); ++step) {
      Pairs sent, received;
      for (int rank = 0; rank < args.size; ++rank) {
        ASSERT_EQ(plans[rank].steps(), plans[0].steps()) << describe(args);
        for (const auto& op : plans[rank].step(step)) {
          if (op.kind == OpKind::kSend) sent[{rank, op.peer}].push_back(op.count);
          if (op.kind == OpKind::kReceive) received[{op.peer, rank}].push_back(op.count);
        }
      }
      ASSERT_EQ(sent, received) << describe(args) << ", step " << step;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Of, EveryPlan,
    ::testing::Combine(
        ::testing::Values(Family{"AllReduceTwoShot", Collective::kAllReduce, Algorithm::kTwoShot},
                          Family{"AllReduceOneShot", Collective::kAllReduce, Algorithm::kOneShot},
                          Family{"ReduceScatter", Collective::kReduceScatter, Algorithm::kTwoShot},
                          Family{"AllGather", Collective::kAllGather, Algorithm::kTwoShot},
                          Family{"Broadcast", Collective::kBroadcast, Algorithm::kTwoShot},
                          Family{"Send", Collective::kSend, Algorithm::kTwoShot}),
        ::testing::Values(0, 1, 2, 4)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "ReceivingAhead" +
             std::to_string(std::get<1>(info.param));
    });

TEST(Plan, OneShotOfOtherCollectivesIsRefusedOrSound) {
  for (const auto collective : {Collective::kReduceScatter, Collective::kAllGather,
                                Collective::kBroadcast, Collective::kSend}) {
    PlanArgs args;
    args.collective = collective;
    args.algorithm = Algorithm::kOneShot;
    args.size = 3;
    args.counts = is_gathered(collective) ? Counts{5, 6, 7} : Counts{18};
    args.chunk = 4;
    try {
      expect_sound(args);
    } catch (const ConfigError&) {
    }
  }
}

PlanArgs two_shot(int size, std::size_t count, std::size_t chunk, std::size_t granularity) {
  PlanArgs args;
  args.collective = Collective::kAllReduce;
  args.size = size;
  args.counts = {count};
  args.chunk = chunk;
  args.granularity = granularity;
  return args;
}

TEST(TwoShotTraffic, DoesNotGrowWithTheNumberOfRanks) {
  constexpr std::size_t kGranularity = 8;
  for (const std::size_t count : {1, 97, 840, 4096, 5003})
    for (const std::size_t chunk : {64, 840, 8192})
      for (int size = 2; size <= 8; ++size) {
        const auto args = two_shot(size, count, chunk, kGranularity);
        SCOPED_TRACE(describe(args));
        const auto sent = simulate(args).sent;
        const std::size_t ranks = sent.size(), chunks = Plan(args).chunks();
        const auto all = std::accumulate(sent.begin(), sent.end(), std::size_t{0});
        EXPECT_EQ(all, 2 * (ranks - 1) * count);
        // A shard is even but for one granule, which its owner sends to all but one peer more.
        const auto uneven = chunks * (ranks - 2) * kGranularity;
        for (const auto values : sent)
          EXPECT_LE(values, 2 * (ranks - 1) * count / ranks + uneven + 1);
      }
}

TEST(TwoShotTraffic, IsTheLeastPossibleWhereShardsAreEven) {
  for (int size = 2; size <= 8; ++size)
    for (const auto values : simulate(two_shot(size, 1680, 840, 1)).sent)
      EXPECT_EQ(values, 2 * 1680 * (size - 1) / size);
}

TEST(BroadcastTraffic, OfTheRootIsEachValueOnce) {
  for (const int size : {2, 3, 5, 8})
    for (int root = 0; root < size; ++root) {
      PlanArgs args = two_shot(size, 1003, 64, 4);
      args.collective = Collective::kBroadcast;
      args.root = root;
      const auto sent = simulate(args).sent;
      EXPECT_EQ(sent[root], 1003) << describe(args);
      EXPECT_EQ(std::accumulate(sent.begin(), sent.end(), std::size_t{0}), (size - 1) * 1003);
    }
}

TEST(ReduceScatterAndAllGatherTraffic, IsOnePayloadPerPeer) {
  const Counts counts = {11, 0, 64, 7};
  for (const auto collective : {Collective::kReduceScatter, Collective::kAllGather}) {
    PlanArgs args = two_shot(4, 0, 8, 1);
    args.collective = collective;
    args.counts = counts;
    const auto sent = simulate(args).sent;
    for (std::size_t rank = 0; rank < counts.size(); ++rank)
      EXPECT_EQ(sent[rank],
                collective == Collective::kAllGather ? 3 * counts[rank] : 82 - counts[rank]);
  }
}

TEST(Plan, BuffersInUseDoNotGrowWithTheTensor) {
  auto args = two_shot(4, 1 << 12, 64, 1);
  const auto depth = Plan(args).depth();
  args.counts = {std::size_t{1} << 40};
  EXPECT_EQ(Plan(args).depth(), depth);
  EXPECT_EQ(Plan(args).max_shard(), 16);
  EXPECT_FALSE(Plan(args).step(Plan(args).steps() - 1).empty());
}

TEST(Plan, OfNothingHasNoSteps) {
  EXPECT_EQ(Plan(two_shot(4, 0, 64, 1)).steps(), 0);
  EXPECT_EQ(Plan(two_shot(4, 0, 64, 1)).max_shard(), 0);
}

TEST(Plan, RefusesImpossibleArguments) {
  const auto refuses = [](const std::function<void(PlanArgs&)>& spoil) {
    auto args = two_shot(3, 100, 8, 4);
    spoil(args);
    EXPECT_THROW(Plan{args}, ConfigError) << describe(args);
  };
  refuses([](PlanArgs& args) { args.chunk = 0; });
  refuses([](PlanArgs& args) { args.chunk = 6; });
  refuses([](PlanArgs& args) { args.window = 0; });
  refuses([](PlanArgs& args) { args.root = 3; });
  refuses([](PlanArgs& args) { args.root = -1; });
  refuses([](PlanArgs& args) { args.counts = {1, 2, 3}; });
  refuses([](PlanArgs& args) { args.collective = Collective::kAllGather; });
}

}  // namespace
}  // namespace cccl::testing
