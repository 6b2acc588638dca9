#include "devices/cpu/platform.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "api/codec.h"
#include "api/measure.h"
#include "devices/cpu/convert.h"
#include "devices/cpu/cpu_codec.h"
#include "devices/cpu/queue.h"

namespace cccl {
namespace {

class CpuAllocator final : public Allocator {
 public:
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    constexpr std::align_val_t alignment{kPayloadAlignment};
    auto* memory = static_cast<std::byte*>(::operator new(bytes, alignment));
    return {memory, [](std::byte* p) { ::operator delete(p, alignment); }};
  }
};

struct CpuErrorSample final : ErrorSample {
  explicit CpuErrorSample(ErrorSums found) : found(found) {}
  ErrorSums sums() const override { return found; }
  ErrorSums found;
};

class CpuPlatform final : public Platform {
 public:
  Device device() const override { return {DeviceKind::kCpu, 0}; }
  std::unique_ptr<Queue> new_queue() const override { return std::make_unique<CpuQueue>(); }
  std::shared_ptr<Queue> queue_on(void*) const override { return std::make_shared<CpuQueue>(); }
  std::unique_ptr<Queue> new_queue_on(void*) const override { return new_queue(); }
  std::unique_ptr<Allocator> allocator_for(Queue&) const override {
    return std::make_unique<CpuAllocator>();
  }
  Flag new_flag() const override { return std::make_shared<std::atomic<std::uint32_t>>(0); }

  void copy(ConstValues from, Values to, Queue&) const override {
    if (from.bytes() && to.data != from.data) std::memcpy(to.data, from.data, from.bytes());
  }

  std::shared_ptr<const std::uint64_t> read_numbers(std::span<const std::byte* const> places,
                                                    Queue&) const override {
    const std::shared_ptr<std::uint64_t[]> numbers(new std::uint64_t[places.size()]);
    for (std::size_t i = 0; i < places.size(); ++i)
      std::memcpy(&numbers[static_cast<std::ptrdiff_t>(i)], places[i], sizeof(std::uint64_t));
    return {numbers, numbers.get()};
  }

  void copy_finite(ConstValues from, Values to, Queue& queue) const override {
    copy(from, to, queue);
    if (!has_non_finite(from)) return;
    const float zero = 0;
    for (std::size_t i = 0; i < to.count; ++i)
      if (!std::isfinite(value_at(to, i))) store(to.dtype, &zero, 1, to.part(i, 1).data);
  }

  void fill_nan(Values out, const Flag& flag, Queue&) const override {
    if (!is_floating(out.dtype) || (flag && !*flag)) return;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = 0; i < out.count; ++i) store(out.dtype, &nan, 1, out.part(i, 1).data);
  }

  std::size_t encode(const Codec& codec, const EncodeArgs& args, const Residual& residual,
                     Queue&) const override {
    return dynamic_cast<const CpuCodec&>(codec).encode(args, residual);
  }

  std::size_t reduce_encode(const Codec& first, const ReduceArgs& args, const Codec& second,
                            const EncodeArgs& target, const Residual& residual,
                            Queue&) const override {
    return dynamic_cast<const CpuCodec&>(first).reduce_encode(args, second, target, &residual);
  }

  std::unique_ptr<ErrorSample> sample_error(const Codec& codec, const EncodeArgs& args,
                                            Queue& queue) const override {
    thread_local std::vector<std::byte> payload, decoded;
    EncodeArgs sample = args;
    sample.in = args.in.part(0, std::min(kErrorSample, args.in.count));
    payload.resize(codec.max_encoded_bytes(sample.in.count, sample.in.dtype));
    decoded.resize(sample.in.bytes());
    sample.out = payload;
    const Values out{decoded.data(), sample.in.count, sample.in.dtype};
    codec.decode({payload.data(), codec.encode(sample, queue)}, out, queue);
    return std::make_unique<CpuErrorSample>(compare(sample.in, out));
  }
};

}  // namespace

std::shared_ptr<const Platform> cpu_platform() {
  static const auto platform = std::make_shared<const CpuPlatform>();
  return platform;
}

}  // namespace cccl
