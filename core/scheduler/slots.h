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
        places_(plan.args().in_place ? 1 : ranks_),
        slot_bytes_((ranks_ + places_) * contribution_bytes_ + places_ * result_bytes_),
        memory_(pool.reserve(depth_ * slot_bytes_)),
        requests_(depth_ * ranks_ * 3),
        elsewhere_(requests_.size()) {}

  const Codec& codec_of(Buffer kind) const {
    return kind == Buffer::kResult ? result_ : contribution_;
  }

  // The room of a payload of as many values as the operation has.
  MutableBytes payload(const Op& op, Buffer kind, int index) const {
    const auto bytes = codec_of(kind).max_encoded_bytes(op.count, dtype_);
    if (std::byte* const there = elsewhere_[number_of(op, kind, index)]) return {there, bytes};
    return {own_payload(op, kind, index), bytes};
  }
  MutableBytes payload(const Op& op) const { return payload(op, op.buffer, op.index); }

  // Its place in this rank's memory, and in that of all others.
  std::byte* own_payload(const Op& op, Buffer kind, int index) const {
    std::byte* at = memory_ + op.chunk % depth_ * slot_bytes_;
    if (kind == Buffer::kOutgoing) return at + index * contribution_bytes_;
    at += ranks_ * contribution_bytes_;
    const std::size_t place = places_ == 1 ? 0 : index;  // alone, it is this rank's
    if (kind == Buffer::kContribution) return at + place * contribution_bytes_;
    return at + places_ * contribution_bytes_ + place * result_bytes_;
  }

  // The payload is read from there from now on, instead of where it would be received.
  void place(const Op& op, std::byte* there) {
    elsewhere_[number_of(op, op.buffer, op.index)] = there;
  }

  // Of transfers that are posted and not awaited.
  std::vector<Request>& requests(const Op& op) {
    return requests_[number_of(op, op.buffer, op.index)];
  }
  std::vector<std::vector<Request>>& all_requests() { return requests_; }

 private:
  std::size_t number_of(const Op& op, Buffer kind, int index) const {
    return (op.chunk % depth_ * 3 + static_cast<std::size_t>(kind)) * ranks_ + index;
  }
  static std::size_t aligned(std::size_t bytes) {
    return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
  }

  const std::size_t ranks_, depth_;
  const Codec &contribution_, &result_;
  const DType dtype_;
  const std::size_t contribution_bytes_, result_bytes_;
  const std::size_t places_;  // for contributions to this rank, and for results
  const std::size_t slot_bytes_;
  std::byte* const memory_;
  std::vector<std::vector<Request>> requests_;  // per buffer
  std::vector<std::byte*> elsewhere_;           // likewise: where it is not in memory_
};

}  // namespace cccl
