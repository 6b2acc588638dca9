#include "hostile.h"

#include <cstring>
#include <memory>

#include "devices/cpu/queue.h"

namespace cccl::testing {
namespace {

// A receiver knows what it expects; none of ours expects more from inputs as small as these.
constexpr std::uint64_t kMostValues = 1 << 16;

// Memory that ends where its last byte ends, so that a sanitizer sees the next one touched.
class Exact {
 public:
  explicit Exact(std::size_t bytes) : memory_(new std::byte[bytes]), bytes_(bytes) {}
  explicit Exact(Bytes from) : Exact(from.size()) {
    if (bytes_) std::memcpy(memory_.get(), from.data(), bytes_);
  }
  MutableBytes all() const { return {memory_.get(), bytes_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t bytes_;
};

void reduce_hostile(const Codec& codec, const Exact& payload, std::size_t count, DType dtype) {
  CpuQueue queue;
  const Bytes twice[] = {payload.all(), payload.all()};
  const ReduceArgs args{twice, 2};
  const Exact out(count * size_of(dtype));
  codec.reduce(args, {out.all().data(), count, dtype}, queue);
  const Exact again(codec.max_encoded_bytes(count, dtype));
  EncodeArgs target;
  target.in = {nullptr, count, dtype};
  target.out = again.all();
  codec.reduce_encode(args, codec, target, queue);
}

}  // namespace

bool decode_hostile(Bytes bytes) {
  try {
    const Exact payload(bytes);
    const auto header = open_payload(payload.all());
    const auto codec = codec_of(header);
    if (header.count > kMostValues) return false;
    const auto count = static_cast<std::size_t>(header.count);
    const DType dtype{header.dtype};
    const Exact out(count * size_of(dtype));
    CpuQueue queue;
    codec->decode(payload.all(), {out.all().data(), count, dtype}, queue);
    if (is_floating(dtype)) reduce_hostile(*codec, payload, count, dtype);
    return true;
  } catch (const CorruptPayloadError&) {
    return false;
  }
}

}  // namespace cccl::testing
