// The pipeline over memory that ranks share: payloads are read where their senders wrote them.
#include "in_place.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "failures.h"
#include "support.h"

namespace cccl::testing {
namespace {

// Calls that follow each other use the same memory, of which nothing may be written too early.
TEST(InPlace, GivesTheBitsOfLoopback) {
  std::mt19937 random(20261130);
  const auto any = [&](auto... values) {
    const std::common_type_t<decltype(values)...> all[] = {values...};
    return all[random() % std::size(all)];
  };
  for (const int world : {2, 3, 5}) {
    Group near(make_in_place(world), Group::kDeadline), singly(world);
    for (int i = 0; i < 120; ++i) {
      const auto codec = [&] {
        return std::string(any("block_float8", "block_float4", "block_float5", "cast_bf16",
                               "identity", "sparse", "lossless"));
      };
      auto setup = setup_of(any(Collective::kAllReduce, Collective::kReduceScatter,
                                Collective::kAllGather, Collective::kBroadcast),
                            codec(), codec());
      setup.root = static_cast<int>(random() % world);
      setup.tuning = {any(std::size_t{0}, std::size_t{9000}, std::size_t{70000}),
                      any(std::size_t{0}, std::size_t{1}, std::size_t{3}),
                      {}};
      if (setup.collective == Collective::kAllReduce)
        setup.tuning.algorithm = any(Algorithm::kOneShot, Algorithm::kTwoShot);
      const auto dtype = any(DType::kFloat32, DType::kBFloat16, DType::kFloat64);
      const std::size_t count = random() % any(2u, 100u, 5000u, 40000u);
      auto expected = singly.round(setup, dtype, count, random());
      auto found = expected;
      singly.run(expected);
      process_stats().reset();
      near.run(found);
      const bool in_place = setup.contribution->info().fixed_size &&
                            setup.result->info().fixed_size && !has_root(setup.collective);
      for (const auto& [key, row] : process_stats().rows())
        ASSERT_EQ(key.algorithm.find("in place") != std::string::npos, in_place) << key.algorithm;
      for (int rank = 0; rank < world; ++rank)
        ASSERT_TRUE(found.out[rank].same_bits(expected.out[rank]))
            << "call " << i << ": " << name_of(setup.collective) << " of " << count << " "
            << name_of(dtype) << ", " << setup.contribution->spec() << " -> "
            << setup.result->spec() << ", rank " << rank << " of " << world;
    }
  }
}

// Ranks that do not wait for each other's calls.
TEST(InPlace, ManyCallsAtOnce) {
  constexpr int kWorld = 3;
  Group near(make_in_place(kWorld), Group::kDeadline), singly(kWorld);
  std::vector<Group::Round> rounds;
  std::vector<std::shared_ptr<Work>> works;
  rounds.reserve(90);
  for (int i = 0; i < 90; ++i) {
    auto setup = setup_of(i % 2 ? Collective::kAllReduce : Collective::kReduceScatter,
                          "block_float8", "block_float4");
    setup.tuning.chunk_bytes = i % 3 ? 4096 : 0;
    rounds.push_back(near.round(setup, DType::kFloat32, i * 331 % 7000, i));
    for (int rank = 0; rank < kWorld; ++rank)
      works.push_back(near.rank(rank).submit(rounds.back().call(rank)));
  }
  for (const auto& work : works) ASSERT_TRUE(work->wait(Seconds{60}));
  for (const auto& round : rounds) {
    auto expected = round;
    singly.run(expected);
    for (int rank = 0; rank < kWorld; ++rank)
      ASSERT_TRUE(round.out[rank].same_bits(expected.out[rank]));
  }
}

// Ranks that mean different things at the first call are told before they look for shared memory.
TEST(InPlace, AFirstCallThatDiffersIsAMismatch) {
  Group near(make_in_place(3), Seconds{20});
  auto round = near.round(setup_of(Collective::kAllReduce, "block_float8", "block_float8"),
                          DType::kFloat32, 5000);
  std::vector<std::shared_ptr<Work>> works{near.rank(0).agree({{"codecs", "plain"}})};
  for (const int rank : {1, 2}) works.push_back(near.rank(rank).submit(round.call(rank)));
  for (const auto& work : works) EXPECT_THROW(work->wait(Seconds{10}), MismatchError);
  EXPECT_NO_THROW(near.run(round));
}

TEST(InPlace, ARankThatDoesNotComeIsAnErrorOnTheOthers) {
  Group near(make_in_place(3), Seconds{0.5});
  auto first = near.round(setup_of(Collective::kAllReduce, "block_float8", "block_float8"),
                          DType::kFloat32, 5000);
  near.run(first);
  auto round = first;
  std::vector<std::shared_ptr<Work>> works;
  for (const int rank : {0, 2}) works.push_back(near.rank(rank).submit(round.call(rank)));
  for (const auto& work : works) EXPECT_THROW(work->wait(Seconds{20}), TransportError);
  for (const int rank : {0, 2}) EXPECT_TRUE(all_nan(round.out[rank]));
}

}  // namespace
}  // namespace cccl::testing
