// Branch-free conversions that compilers vectorise on every instruction set, and that CUDA code can
// call.
// After F. Giesen, "float->half variants" (public domain).
#pragma once

#include <bit>
#include <cstdint>

namespace cccl {

constexpr float half_to_float(std::uint16_t h) {
  const std::uint32_t magnitude = std::uint32_t{h & 0x7FFFu} << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // exact, denormals included
  const std::uint32_t special = (h & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special |
                              (std::uint32_t{h & 0x8000u} << 16));
}

constexpr std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits & 0x80000000u, a = bits ^ sign;
  const std::uint32_t special = a > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const std::uint32_t denormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3F000000u;
  const std::uint32_t normal = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1)) >> 13;
  const std::uint32_t half = a >= 0x47800000u ? special : a < 0x38800000u ? denormal : normal;
  return static_cast<std::uint16_t>(half | (sign >> 16));
}

constexpr float bfloat_to_float(std::uint16_t b) {
  return std::bit_cast<float>(std::uint32_t{b} << 16);
}

constexpr std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

}  // namespace cccl
