// Bodies as words, at any address.
#pragma once

#include "devices/cuda/body.cuh"

namespace cccl::cuda {

// A thread's part of some bytes in a payload: `valid` of them exist, the rest of `words` is zero.
// `vector`: all exist, at an address for the widest accesses.
template <int kCount>
__device__ inline void read_words(const std::byte* at, int valid, bool vector,
                                  std::uint32_t (&words)[kCount]) {
  if (vector) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(at)[i / 4];
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    words[i] = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (4 * i + b < valid) words[i] |= static_cast<std::uint32_t>(at[4 * i + b]) << 8 * b;
  }
}

template <int kCount>
__device__ inline void write_words(std::byte* at, int valid, bool vector,
                                   const std::uint32_t (&words)[kCount]) {
  if (vector) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      __stcs(reinterpret_cast<uint4*>(at) + i / 4,
             uint4{words[i], words[i + 1], words[i + 2], words[i + 3]});
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (4 * i + b < valid) at[4 * i + b] = static_cast<std::byte>(words[i] >> 8 * b);
}

// What words from `offset` in a body on add to its checksum. Those that do not exist are zero.
template <int kCount>
__device__ inline std::uint64_t checksum_at(std::uint64_t offset,
                                            const std::uint32_t (&words)[kCount]) {
  std::uint64_t sum = 0;
  const std::uint32_t weight = weight_at(offset);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += std::uint64_t{words[i]} * (weight + 2 * i);
  return sum;
}

__device__ inline std::uint64_t checksum_at(std::uint64_t offset, std::uint32_t word) {
  return std::uint64_t{word} * weight_at(offset);
}

// A word at any address, unless `kAligned`.
template <bool kAligned>
__device__ inline std::uint32_t read_word(const std::byte* at) {
  if constexpr (kAligned) return *reinterpret_cast<const std::uint32_t*>(at);
  std::uint32_t word[1];
  read_words(at, 4, false, word);
  return word[0];
}

template <bool kAligned>
__device__ inline void write_word(std::byte* at, std::uint32_t value) {
  if constexpr (kAligned) {
    *reinterpret_cast<std::uint32_t*>(at) = value;
  } else {
    const std::uint32_t word[1] = {value};
    write_words(at, 4, false, word);
  }
}

// A body whose words may lie at any address.
struct WordReader {
  const std::byte* body;
  bool aligned;  // to words

  // Adds it to a checksum.
  __device__ std::uint32_t word(std::uint64_t offset, std::uint64_t& sum) const {
    const std::byte* const at = body + offset;
    const std::uint32_t word = aligned ? read_word<true>(at) : read_word<false>(at);
    sum += checksum_at(offset, word);
    return word;
  }
};

struct WordWriter {
  std::byte* body;
  bool aligned;

  __device__ void word(std::uint64_t offset, std::uint32_t value, std::uint64_t& sum) const {
    if (aligned)
      write_word<true>(body + offset, value);
    else
      write_word<false>(body + offset, value);
    sum += checksum_at(offset, value);
  }
};

}  // namespace cccl::cuda
