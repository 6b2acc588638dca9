// Bodies that are values kept as elements of a type: those of casts, and of sums in identity.
#pragma once

#include "devices/cuda/body.cuh"

namespace cccl::cuda {

// Whether a value's magnitude is kOverflow or more: an Inf, or no number.
template <std::uint32_t kOverflow>
__device__ inline bool overflows(float value) {
  return (__float_as_uint(value) & 0x7FFFFFFFu) >= kOverflow;
}
template <std::uint32_t>
__device__ inline bool overflows(double value) {
  return !isfinite(value);
}

// ValuesOf: the element type that it serves, or void for all. kOverflow: the bits of the least
// float that is stored as an Inf.
template <class Element, class ValuesOf, std::uint32_t kOverflow>
struct ElementEncoder {
  using Values = ValuesOf;
  using Real = SumOf<Element>;
  static constexpr bool kNanBits = true;

  __device__ void prepare() const {}

  template <int kVector, class Tile>
  __device__ bool encode(const Tile& tile, Real (&values)[kPerLane], BodyWriter& out) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) found |= overflows<kOverflow>(values[i]);
    Chunk<kVector * sizeof(Element)> rows[kPerLane / kVector];
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k)
      rows[k] = store<Element, false, kVector>(values + k * kVector);
    out.rows(tile, tile.first * sizeof(Element), tile.count * sizeof(Element), rows);
    return found;
  }
};

template <class Element, class ValuesOf>
struct ElementDecoder {
  using Values = ValuesOf;
  static constexpr int kVector = kChunkBytes / sizeof(Element);
  static constexpr float kZero = -0.0f;

  template <int kVector>
  struct Fetched {
    Chunk<kVector * sizeof(Element)> rows[kPerLane / kVector];
  };

  template <int kVector, class Tile>
  __device__ Fetched<kVector> fetch(const Tile& tile, const BodyReader& in) const {
    Fetched<kVector> fetched;
    in.rows(tile, tile.first * sizeof(Element), tile.count * sizeof(Element), fetched.rows);
    return fetched;
  }

  template <class Tile>
  __device__ void prefetch(const Tile& tile, const BodyReader& in) const {
    constexpr int kLines = kTileValues * sizeof(Element) / kLineBytes;
#pragma unroll
    for (int line = 0; line < kLines; line += kLanes)
      if (line + lane_id() < kLines)
        in.prefetch(tile.ahead * sizeof(Element) + (line + lane_id()) * kLineBytes);
  }

  template <int kVector, class Tile>
  __device__ std::uint64_t checksum(const Tile& tile, const Fetched<kVector>& fetched) const {
    return checksum_of(tile.first * sizeof(Element), lane_id(), fetched.rows);
  }

  template <int kVector, bool kAdd, class Tile, class Real>
  __device__ void apply(const Tile&, const Fetched<kVector>& fetched,
                        Real (&values)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k) {
      Real terms[kVector];
      load<Element, true, Real, kVector>(fetched.rows[k], terms);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        Real& value = values[k * kVector + v];
        value = kAdd ? value + terms[v] : terms[v];
      }
    }
  }
};

}  // namespace cccl::cuda
