#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "devices/cpu/queue.h"
#include "hostile.h"
#include "support.h"

namespace cccl::testing {
namespace {

using Payload = std::vector<std::byte>;

Payload encoded(const Codec& codec, DType dtype, std::size_t count, bool checksum = true) {
  const auto values = random_array(dtype, count, count + 1);
  Payload payload(codec.max_encoded_bytes(count, dtype));
  CpuQueue queue;
  EncodeArgs args;
  args.in = values.view();
  args.checksum = checksum;
  args.out = payload;
  payload.resize(codec.encode(args, queue));
  return payload;
}

PayloadHeader header_of(const Payload& payload) {
  PayloadHeader header;
  std::memcpy(&header, payload.data(), sizeof header);
  return header;
}

// Writes the header with good check values, so that what lies behind those checks is reached.
void reseal(Payload& payload, PayloadHeader header) {
  const bool whole = header.body_bytes <= payload.size() - sizeof header;
  if (!whole) header.flags &= ~kHasChecksum;
  seal_payload(payload, header, whole && header.flags & kHasChecksum);
}

class HostilePayload : public ::testing::TestWithParam<std::shared_ptr<const Codec>> {
 protected:
  const Codec& codec_ = *GetParam();
  std::mt19937_64 random_{20240607};

  std::size_t below(std::size_t n) { return random_() % n; }

  std::vector<DType> dtypes() const {
    std::vector<DType> found;
    for (const auto dtype : kFloats)
      if (codec_.supports(dtype)) found.push_back(dtype);
    return found;
  }

  std::uint8_t random_dtype() {
    if (below(4) == 0) return static_cast<std::uint8_t>(random_());
    return static_cast<std::uint8_t>(kDTypes[below(std::size(kDTypes))].dtype);
  }

  void spoil(PayloadHeader& header) {
    const std::uint64_t counts[] = {0,          1,          header.count + 1, header.count * 2,
                                    1u << 16,   1ull << 32, 1ull << 61,       1ull << 62,
                                    1ull << 63, ~0ull,      random_(),        below(70000)};
    switch (below(8)) {
      case 0: header.codec = static_cast<std::uint8_t>(below(14)); break;
      case 1: header.dtype = random_dtype(); break;
      case 2: header.flags = static_cast<std::uint8_t>(random_()); break;
      case 3: header.count = counts[below(std::size(counts))]; break;
      case 4: header.body_bytes = counts[below(std::size(counts))]; break;
      case 5: header.params[below(4)] = static_cast<std::uint8_t>(below(20)); break;
      case 6: header.params[below(4)] = static_cast<std::uint8_t>(random_()); break;
      case 7: header.seed = random_(); break;
    }
  }
};

TEST_P(HostilePayload, IsAcceptedWhole) {
  for (const auto dtype : dtypes())
    for (const std::size_t count : {0, 1, 33, 1025})
      for (const bool checksum : {true, false})
        EXPECT_TRUE(decode_hostile(encoded(codec_, dtype, count, checksum)));
}

TEST_P(HostilePayload, WithAnySingleBitFlippedIsRefused) {
  for (const std::size_t count : {0, 1, 130}) {
    const auto whole = encoded(codec_, dtypes().front(), count);
    for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
      auto flipped = whole;
      flipped[bit / 8] ^= std::byte{1} << bit % 8;
      ASSERT_FALSE(decode_hostile(flipped)) << "bit " << bit << " of " << count << " values";
    }
  }
}

TEST_P(HostilePayload, CutShortAnywhereIsRefused) {
  for (const bool checksum : {true, false}) {
    const auto whole = encoded(codec_, dtypes().front(), 260, checksum);
    for (std::size_t bytes = 0; bytes < whole.size(); ++bytes)
      ASSERT_FALSE(decode_hostile(Bytes(whole).first(bytes))) << bytes << " bytes";
  }
}

TEST_P(HostilePayload, WithWrongHeadersUnderGoodChecksIsRefusedOrDecodedInBounds) {
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    const auto all = dtypes();
    auto payload = encoded(codec_, all[below(all.size())], below(3) ? below(300) : below(2));
    auto header = header_of(payload);
    for (std::size_t i = 0; i <= below(3); ++i) spoil(header);
    if (below(4) == 0) payload.resize(sizeof header + below(payload.size()));
    reseal(payload, header);
    try {
      accepted += decode_hostile(payload);
    } catch (const std::exception& error) {
      FAIL() << "round " << round << ", codec " << int{header.codec} << ", dtype "
             << int{header.dtype} << ", count " << header.count << ": " << error.what();
    }
  }
  EXPECT_GT(accepted, 0) << "no mutation reached the decoder";
}

TEST_P(HostilePayload, WithGarbageForABodyIsRefusedOrDecodedInBounds) {
  for (int round = 0; round < 1000; ++round) {
    const auto all = dtypes();
    auto payload = encoded(codec_, all[below(all.size())], 1 + below(300), round % 2);
    const std::size_t changes = below(2) ? payload.size() : 1 + below(4);
    for (std::size_t i = 0; i < changes; ++i) {
      const std::size_t at = sizeof(PayloadHeader) + below(payload.size() - sizeof(PayloadHeader));
      payload[at] = static_cast<std::byte>(random_());
    }
    reseal(payload, header_of(payload));
    ASSERT_NO_THROW(decode_hostile(payload)) << "round " << round;
  }
}

// CCCLIB_FUZZ_SECONDS goes on for so long.
TEST_P(HostilePayload, OfSeveralBlocksWithChangesIsRefusedOrDecodedInBounds) {
  if (codec_.info().fixed_size) GTEST_SKIP() << "its size says where everything is";
  const char* const seconds = std::getenv("CCCLIB_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(seconds ? std::strtol(seconds, nullptr, 10) : 0);
  int accepted = 0;
  for (int round = 0; round < 300 || std::chrono::steady_clock::now() < end; ++round) {
    const auto all = dtypes();
    auto payload = encoded(codec_, all[below(all.size())], below(20000), round % 2);
    const std::size_t head = sizeof(PayloadHeader);
    for (std::size_t i = below(5); i > 0 && payload.size() > head; --i) {
      // Directories, at the start, more often than the rest.
      const std::size_t most =
          below(2) ? std::min<std::size_t>(payload.size() - head, 64) : payload.size() - head;
      payload[head + below(most)] = static_cast<std::byte>(below(2) ? random_() : below(4));
    }
    auto header = header_of(payload);
    if (below(4) == 0) {
      payload.resize(head + below(payload.size() - head + 1));
      header.body_bytes = payload.size() - head;
    }
    if (below(8) == 0) spoil(header);
    reseal(payload, header);
    try {
      accepted += decode_hostile(payload);
    } catch (const std::exception& error) {
      FAIL() << "round " << round << ", dtype " << int{header.dtype} << ", count " << header.count
             << ": " << error.what();
    }
  }
  EXPECT_GT(accepted, 0) << "no mutation reached the decoder";
}

TEST_P(HostilePayload, OfAnotherSizeOrTypeThanExpectedIsRefused) {
  CpuQueue queue;
  const auto dtype = dtypes().front();
  const auto payload = encoded(codec_, dtype, 200);
  for (const std::size_t count : {0, 1, 199, 201, 4096}) {
    Array out(dtype, count);
    EXPECT_THROW(codec_.decode(payload, out.view(), queue), CorruptPayloadError);
  }
  for (const auto& row : kDTypes) {
    if (row.dtype == dtype) continue;
    std::vector<std::byte> out(200 * row.size);
    EXPECT_THROW(codec_.decode(payload, {out.data(), 200, row.dtype}, queue), CorruptPayloadError)
        << row.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, HostilePayload, ::testing::ValuesIn(all_codecs()),
                         [](const auto& info) { return test_name(*info.param); });

TEST(HeaderThatCountsMoreThanMemoryHolds, IsRefusedOnOpening) {
  for (const std::uint64_t count : {1ull << 61, (1ull << 62) + 8, 1ull << 63, ~0ull}) {
    auto payload = encoded(*make_codec("identity"), DType::kFloat32, 8);
    auto header = header_of(payload);
    header.count = count;
    reseal(payload, header);
    EXPECT_THROW(open_payload(payload), CorruptPayloadError) << count;
  }
}

TEST(RandomBytes, AreRefused) {
  std::mt19937_64 random{1};
  for (int round = 0; round < 3000; ++round) {
    Payload payload(random() % 300);
    std::ranges::generate(payload, [&] { return static_cast<std::byte>(random()); });
    EXPECT_FALSE(decode_hostile(payload));
    if (payload.size() < sizeof(PayloadHeader)) continue;
    auto header = header_of(payload);
    header.magic = kPayloadMagic;
    header.version = kPayloadVersion;
    reseal(payload, header);
    EXPECT_FALSE(decode_hostile(payload));
  }
}

}  // namespace
}  // namespace cccl::testing
