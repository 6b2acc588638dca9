// Where the payloads of the chunks in flight lie, and the transfers that use them.
#pragma once

#include <cstddef>
#include <vector>

#include "api/codec.h"
#include "api/transport.h"
#include "scheduler/plan.h"
#include "scheduler/pool.h"

namespace cccl {

class Slots {
 public:
  Slots(const Plan& plan, const Codec& contribution, const Codec& result, DType dtype, Pool& pool)
      : ranks_(static_cast<std::size_t>(plan.args().size)),
        depth_(plan.depth()),
        contribution_(contribution),
        result_(result),
        dtype_(dtype),
        contribution_bytes_(aligned(contribution.max_encoded_bytes(plan.max_shard(), dtype))),
        result_bytes_(aligned(result.max_encoded_bytes(plan.max_shard(), dtype))),
        slot_bytes_(ranks_ * (2 * contribution_bytes_ + result_bytes_)),
        memory_(pool.reserve(depth_ * slot_bytes_)),
        requests_(depth_ * ranks_ * 3) {}

  const Codec& codec_of(Buffer kind) const {
    return kind == Buffer::kResult ? result_ : contribution_;
  }

  // The room of a payload of as many values as the operation has.
  MutableBytes payload(const Op& op, Buffer kind, int index) const {
    std::byte* at = memory_ + op.chunk % depth_ * slot_bytes_;
    if (kind != Buffer::kOutgoing) at += ranks_ * contribution_bytes_;
    if (kind == Buffer::kResult) at += ranks_ * contribution_bytes_;
    at += index * (kind == Buffer::kResult ? result_bytes_ : contribution_bytes_);
    return {at, codec_of(kind).max_encoded_bytes(op.count, dtype_)};
  }
  MutableBytes payload(const Op& op) const { return payload(op, op.buffer, op.index); }

  // Of transfers that are posted and not awaited.
  std::vector<Request>& requests(const Op& op) {
    const std::size_t kind = static_cast<std::size_t>(op.buffer);
    return requests_[(op.chunk % depth_ * 3 + kind) * ranks_ + op.index];
  }
  std::vector<std::vector<Request>>& all_requests() { return requests_; }

 private:
  static std::size_t aligned(std::size_t bytes) {
    return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
  }

  const std::size_t ranks_, depth_;
  const Codec &contribution_, &result_;
  const DType dtype_;
  const std::size_t contribution_bytes_, result_bytes_, slot_bytes_;
  std::byte* const memory_;
  std::vector<std::vector<Request>> requests_;  // per buffer
};

}  // namespace cccl
