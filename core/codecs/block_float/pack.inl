// Codes, a byte each, to and from a little-endian string of bits: eight codes fill kBits bytes.
// Fields move together within 64-bit words, which vectors do; words then lie kBits bytes apart.

// The low `bits` bits of every `lane` bits.
constexpr std::uint64_t low_bits(int bits, int lane) {
  std::uint64_t mask = 0;
  for (int at = 0; at < 64; at += lane) mask |= ((std::uint64_t{1} << bits) - 1) << at;
  return mask;
}

// Two fields of kField bits, each at the bottom of half a lane, become one of twice that.
template <int kField, int kLane>
constexpr std::uint64_t join(std::uint64_t x) {
  constexpr std::uint64_t kLow = low_bits(kField, kLane);
  return (x & kLow) | (x >> (kLane / 2 - kField) & kLow << kField);
}
template <int kField, int kLane>
constexpr std::uint64_t part(std::uint64_t x) {
  constexpr std::uint64_t kLow = low_bits(kField, kLane);
  return (x & kLow) | (x & kLow << kField) << (kLane / 2 - kField);
}

// n is 0 or a multiple of kMinBlock.
template <int kBits>
inline void pack(const std::uint8_t* __restrict codes, std::size_t n, std::byte* __restrict out) {
  if constexpr (kBits == 4) {
    for (std::size_t i = 0; i < n / 2; ++i)
      out[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
  } else if constexpr (kBits == 2) {
    for (std::size_t i = 0; i < n / 4; ++i) {
      std::uint32_t x;
      std::memcpy(&x, codes + 4 * i, sizeof x);
      x |= x >> 6;
      out[i] = static_cast<std::byte>(x | x >> 12);
    }
  } else {
    alignas(64) std::uint64_t words[kTile / 8];
    const std::size_t count = n / 8;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t x;
      std::memcpy(&x, codes + 8 * i, sizeof x);
      words[i] = join<4 * kBits, 64>(join<2 * kBits, 32>(join<kBits, 16>(x)));
    }
    // A whole word where what it writes too much is written over, by the next ones.
    constexpr std::size_t kLast = (8 + kBits - 1) / kBits - 1;
    const std::size_t whole = count > kLast ? count - kLast : 0;
    for (std::size_t i = 0; i < whole; ++i) std::memcpy(out + i * kBits, &words[i], sizeof *words);
    for (std::size_t i = whole; i < count; ++i) std::memcpy(out + i * kBits, &words[i], kBits);
  }
}

// Any n; there is room for codes up to the next multiple of 8.
template <int kBits>
inline void unpack(const std::byte* __restrict in, std::size_t n, std::uint8_t* __restrict codes) {
  if constexpr (kBits == 4) {
    for (std::size_t i = 0; i < n / 2; ++i) {
      codes[2 * i] = static_cast<std::uint8_t>(in[i]) & 15;
      codes[2 * i + 1] = static_cast<std::uint8_t>(in[i]) >> 4;
    }
    if (n % 2) codes[n - 1] = static_cast<std::uint8_t>(in[n / 2]) & 15;
  } else if constexpr (kBits == 2) {
    for (std::size_t i = 0; i < (n + 3) / 4; ++i) {
      std::uint32_t x = static_cast<std::uint8_t>(in[i]);
      x = (x | x << 12) & 0x000F000Fu;
      x = (x | x << 6) & 0x03030303u;
      std::memcpy(codes + 4 * i, &x, sizeof x);
    }
  } else {
    alignas(64) std::uint64_t words[kTile / 8];
    const std::size_t count = (n + 7) / 8, bytes = (n * kBits + 7) / 8;
    const std::size_t whole = bytes < 8 ? 0 : (bytes - 8) / kBits + 1;
    for (std::size_t i = 0; i < whole; ++i) std::memcpy(&words[i], in + i * kBits, sizeof *words);
    for (std::size_t i = whole; i < count; ++i) {
      const std::size_t left = bytes - i * kBits;
      words[i] = 0;
      std::memcpy(&words[i], in + i * kBits, left < kBits ? left : kBits);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t x = part<kBits, 16>(part<2 * kBits, 32>(part<4 * kBits, 64>(words[i])));
      std::memcpy(codes + 8 * i, &x, sizeof x);
    }
  }
}
