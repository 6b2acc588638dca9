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

  template <int kVector>
  __device__ bool encode(const WarpTile& tile, Real (&values)[kPerLane], BodyWriter& out) const {
    bool found = false;
#pragma unroll
    for (Real value : values) found |= overflows<kOverflow>(value);
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k)
      out.row(tile, (tile.first + k * kLanes * kVector) * sizeof(Element),
              tile.count * sizeof(Element),
              store<Element, false, kVector>(values + k * kVector));
    return found;
  }
};

template <class Element, class ValuesOf>
struct ElementDecoder {
  using Values = ValuesOf;
  static constexpr int kVector = kChunkBytes / sizeof(Element);

  template <int kVector>
  struct Fetched {
    Chunk<kVector * sizeof(Element)> rows[kPerLane / kVector];
  };

  template <int kVector>
  __device__ Fetched<kVector> fetch(const WarpTile& tile, BodyReader& in) const {
    Fetched<kVector> fetched;
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k)
      fetched.rows[k] = in.template row<kVector * sizeof(Element)>(
          tile, (tile.first + k * kLanes * kVector) * sizeof(Element),
          tile.count * sizeof(Element));
    return fetched;
  }

  template <int kVector, bool kAdd, class Real>
  __device__ void apply(const Fetched<kVector>& fetched, Real (&values)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k) {
      Real terms[kVector];
      load<Element, true, Real, kVector>(fetched.rows[k], terms);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        values[k * kVector + v] = kAdd ? values[k * kVector + v] + terms[v] : terms[v];
    }
  }
};

}  // namespace cccl::cuda
