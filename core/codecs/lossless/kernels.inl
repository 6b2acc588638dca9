// One block at a time: n <= kBlock values. Arrays of bytes have kRoom bytes.

// A byte's low two bits, of eight bytes, side by side; and back.
inline std::uint64_t join_digits(std::uint64_t bytes) {
#ifdef CCCLIB_BMI2
  return _pext_u64(bytes, 0x0303030303030303u);
#else
  bytes &= 0x0303030303030303u;
  bytes = (bytes | bytes >> 6) & 0x000F000F000F000Fu;
  bytes = (bytes | bytes >> 12) & 0x000000FF000000FFu;
  return (bytes | bytes >> 24) & 0xFFFFu;
#endif
}
inline std::uint64_t spread_digits(std::uint64_t digits) {
#ifdef CCCLIB_BMI2
  return _pdep_u64(digits, 0x0303030303030303u);
#else
  digits &= 0xFFFFu;
  digits = (digits | digits << 24) & 0x000000FF000000FFu;
  digits = (digits | digits << 12) & 0x000F000F000F000Fu;
  return (digits | digits << 6) & 0x0303030303030303u;
#endif
}

// The digits of `word` at the places that `low` has a bit for (the lower of two), side by side;
// and back.
inline std::uint64_t gather_digits(std::uint64_t word, std::uint64_t low) {
#ifdef CCCLIB_BMI2
  return _pext_u64(word, 3 * low);
#else
  std::uint64_t found = 0;
  for (int at = 0; low; low &= low - 1, at += 2) found |= (word >> std::countr_zero(low) & 3) << at;
  return found;
#endif
}
inline std::uint64_t scatter_digits(std::uint64_t word, std::uint64_t low) {
#ifdef CCCLIB_BMI2
  return _pdep_u64(word, 3 * low);
#else
  std::uint64_t found = 0;
  for (; low; low &= low - 1, word >>= 2) found |= (word & 3) << std::countr_zero(low);
  return found;
#endif
}

// Where the digit is 3: more of that value follow.
inline std::uint64_t threes(std::uint64_t word) { return word & word >> 1 & 0x5555555555555555u; }

inline std::uint64_t word_at(const std::byte* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// Of digits in order: where a plane's next ones are, and where they go.
struct Plane {
  std::byte* bytes;  // 8 more than its digits have may be touched
  std::size_t bits = 0;

  std::uint64_t read(int digits) {
    const std::byte* const at = bytes + bits / 64 * 8;
    const int shift = static_cast<int>(bits % 64);
    bits += 2 * digits;
    const std::uint64_t low = word_at(at) >> shift;
    return shift ? low | word_at(at + 8) << (64 - shift) : low;
  }
  void write(std::uint64_t word, int digits) {
    std::byte* const at = bytes + bits / 64 * 8;
    const int shift = static_cast<int>(bits % 64);
    bits += 2 * digits;
    std::uint64_t low = shift ? word_at(at) : 0;
    low |= word << shift;
    std::memcpy(at, &low, sizeof low);
    const std::uint64_t high = shift ? word >> (64 - shift) : 0;
    std::memcpy(at + 8, &high, sizeof high);
  }
};

inline std::uint8_t all_ones(bool condition) { return condition ? 255 : 0; }

template <class Word>
inline Word element(const std::byte* values, std::size_t i) {
  Word word;
  std::memcpy(&word, values + i * sizeof word, sizeof word);
  return word;
}
template <class Word>
inline void set_element(std::byte* values, std::size_t i, Word word) {
  std::memcpy(values + i * sizeof word, &word, sizeof word);
}

// bfloat16, and the upper half of float32: sign and mantissa make a byte.
inline std::uint8_t exponent_of(std::uint16_t v) { return static_cast<std::uint8_t>(v >> 7); }
inline std::uint8_t rest_of(std::uint16_t v) {
  return static_cast<std::uint8_t>((v >> 8 & 0x80) | (v & 0x7F));
}
inline std::uint16_t value_of(std::uint8_t exponent, std::uint8_t rest) {
  return static_cast<std::uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7F));
}

void split_bfloat(const std::byte* __restrict in, std::size_t n, std::uint8_t* __restrict exponents,
                  std::byte* __restrict rest) {
  for (std::size_t i = 0; i < n; ++i) {
    const auto v = element<std::uint16_t>(in, i);
    exponents[i] = exponent_of(v);
    rest[i] = static_cast<std::byte>(rest_of(v));
  }
}
void join_bfloat(const std::uint8_t* __restrict exponents, const std::byte* __restrict rest,
                 std::size_t n, std::byte* __restrict out) {
  for (std::size_t i = 0; i < n; ++i)
    set_element(out, i, value_of(exponents[i], static_cast<std::uint8_t>(rest[i])));
}

void split_float(const std::byte* __restrict in, std::size_t n, std::uint8_t* __restrict exponents,
                 std::byte* __restrict rest) {
  std::byte* __restrict upper = rest + padded(2 * n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto v = element<std::uint32_t>(in, i);
    set_element(rest, i, static_cast<std::uint16_t>(v));
    exponents[i] = exponent_of(static_cast<std::uint16_t>(v >> 16));
    upper[i] = static_cast<std::byte>(rest_of(static_cast<std::uint16_t>(v >> 16)));
  }
}
void join_float(const std::uint8_t* __restrict exponents, const std::byte* __restrict rest,
                std::size_t n, std::byte* __restrict out) {
  const std::byte* __restrict upper = rest + padded(2 * n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto high = value_of(exponents[i], static_cast<std::uint8_t>(upper[i]));
    set_element(out, i, std::uint32_t{high} << 16 | element<std::uint16_t>(rest, i));
  }
}

// float16: the low byte, then two bits of each value, then the signs.
void split_half(const std::byte* __restrict in, std::size_t n, std::uint8_t* __restrict exponents,
                std::byte* __restrict rest) {
  alignas(64) std::uint8_t pairs[kRoom], signs[kRoom];
  for (std::size_t i = 0; i < n; ++i) {
    const auto v = element<std::uint16_t>(in, i);
    rest[i] = static_cast<std::byte>(v);
    pairs[i] = static_cast<std::uint8_t>(v >> 8 & 3);
    signs[i] = static_cast<std::uint8_t>(v >> 15);
    exponents[i] = static_cast<std::uint8_t>(v >> 10 & 31);
  }
  std::memset(pairs + n, 0, 32);
  std::memset(signs + n, 0, 32);
  std::byte* to = rest + padded(n);
  for (std::size_t i = 0; i < n; i += 16, to += 4) {
    std::uint64_t eight[2];
    std::memcpy(eight, pairs + i, sizeof eight);
    const std::uint64_t word = join_digits(eight[0]) | join_digits(eight[1]) << 16;
    set_element(to, 0, static_cast<std::uint32_t>(word));
  }
  for (std::size_t i = 0; i < n; i += 32, to += 4) {
    std::uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      std::uint64_t eight;
      std::memcpy(&eight, signs + i + 8 * b, sizeof eight);
      // A byte's bit i is the sign of value i.
      word |= static_cast<std::uint32_t>(eight * 0x0102040810204080u >> 56) << 8 * b;
    }
    set_element(to, 0, word);
  }
}
void join_half(const std::uint8_t* __restrict exponents, const std::byte* __restrict rest,
               std::size_t n, std::byte* __restrict out) {
  alignas(64) std::uint8_t pairs[kRoom], signs[kRoom];
  const std::byte* from = rest + padded(n);
  for (std::size_t i = 0; i < n; i += 16, from += 4) {
    const std::uint64_t word = element<std::uint32_t>(from, 0);
    const std::uint64_t eight[] = {spread_digits(word & 0xFFFF), spread_digits(word >> 16)};
    std::memcpy(pairs + i, eight, sizeof eight);
  }
  for (std::size_t i = 0; i < n; i += 8, ++from) {
    const std::uint64_t bits = static_cast<std::uint64_t>(*from) * 0x0101010101010101u;
    // Byte i is 0x80 where bit i is set.
    const std::uint64_t eight =
        ((bits & 0x8040201008040201u) + 0x7F7F7F7F7F7F7F7Fu) & 0x8080808080808080u;
    std::memcpy(signs + i, &eight, sizeof eight);
  }
  for (std::size_t i = 0; i < n; ++i) {
    const auto high = static_cast<std::uint8_t>(signs[i] | (exponents[i] & 31) << 2 | pairs[i]);
    set_element(out, i, static_cast<std::uint16_t>(high << 8 | static_cast<int>(rest[i])));
  }
}

bool contains(const std::uint8_t* exponents, std::size_t n, std::uint8_t sought) {
  std::uint8_t found = 0;
  for (std::size_t i = 0; i < n; ++i) found |= exponents[i] == sought ? 1 : 0;
  return found != 0;
}

void count(const std::uint8_t* exponents, std::size_t n, std::size_t step, std::uint32_t* counts) {
  std::uint32_t more[3][256] = {};  // an increment does not wait for the one before
  std::size_t i = 0;
  for (; i + 3 * step < n; i += 4 * step) {
    ++counts[exponents[i]];
    ++more[0][exponents[i + step]];
    ++more[1][exponents[i + 2 * step]];
    ++more[2][exponents[i + 3 * step]];
  }
  for (; i < n; i += step) ++counts[exponents[i]];
  for (int e = 0; e < 256; ++e) counts[e] += more[0][e] + more[1][e] + more[2][e];
}

// Digits of the exponents' ranks, plane by plane, and the exponents that have none. Planes have
// room for as many digits as values; returns how many each has, the escapes last.
std::array<std::size_t, kPlanes + 1> write_digits(const std::uint8_t* __restrict exponents,
                                                  std::size_t n, const Table& table,
                                                  std::byte* const (&planes)[kPlanes],
                                                  std::byte* escapes) {
  alignas(64) std::uint8_t ranks[kRoom], digits[kPlanes][kRoom];
  std::uint8_t sought[kTable], change[kTable];  // locals: nothing written can be these
  for (int k = 0; k < kTable; ++k) {
    sought[k] = table.exponents[k];
    change[k] = k < table.used ? k ^ kTable : 0;
  }
  for (std::size_t i = 0; i < n; ++i) {
    std::uint8_t rank = kTable;
#pragma GCC unroll 16
    for (int k = 0; k < kTable; ++k) rank ^= all_ones(exponents[i] == sought[k]) & change[k];
    ranks[i] = rank;
  }
  std::memset(ranks + n, 0, 32);
  for (int p = 0; p < kPlanes; ++p) {
    const std::uint8_t before = 3 * p;
    for (std::size_t i = 0; i < n + 32; ++i) {
      const std::uint8_t above = ranks[i] > before ? ranks[i] - before : 0;
      digits[p][i] = above < 3 ? above : 3;
    }
  }
  Plane writers[kPlanes];
  for (int p = 0; p < kPlanes; ++p) writers[p].bytes = planes[p];
  std::size_t escaped = 0;
  for (std::size_t i = 0; i < n; i += 32) {
    std::uint64_t places = 0x5555555555555555u;  // of values that have a digit in the plane
#pragma GCC unroll 4
    for (int p = 0; p < kPlanes; ++p) {
      std::uint64_t word = 0;
      for (int b = 0; b < 4; ++b) {
        std::uint64_t eight;
        std::memcpy(&eight, digits[p] + i + 8 * b, sizeof eight);
        word |= join_digits(eight) << 16 * b;
      }
      writers[p].write(p == 0 ? word : gather_digits(word, places), std::popcount(places));
      places = threes(word);
    }
    for (; places; places &= places - 1)
      escapes[escaped++] = static_cast<std::byte>(exponents[i + std::countr_zero(places) / 2]);
  }
  std::array<std::size_t, kPlanes + 1> held{n};
  for (int p = 1; p < kPlanes; ++p) held[p] = writers[p].bits / 2;
  held[kPlanes] = escaped;
  return held;
}

// How many of a plane's digits are 3.
std::size_t count_threes(const std::byte* plane, std::size_t digits) {
  std::size_t found = 0, left = digits;
  for (; left >= 32; left -= 32, plane += 8)
    found += static_cast<std::size_t>(std::popcount(threes(word_at(plane))));
  std::uint64_t last = 0;
  std::memcpy(&last, plane, (left + 3) / 4);
  last &= (std::uint64_t{1} << 2 * left) - 1;
  return found + static_cast<std::size_t>(std::popcount(threes(last)));
}

// Planes hold all digits, and 16 bytes behind them may be read.
void read_digits(std::byte* const (&planes)[kPlanes], const std::byte* escapes, std::size_t n,
                 const Table& table, std::uint8_t* __restrict exponents) {
  alignas(64) std::uint8_t ranks[kRoom];
  std::uint64_t escaped[kRoom / 32];
  Plane readers[kPlanes];
  for (int p = 0; p < kPlanes; ++p) readers[p].bytes = planes[p];
  for (std::size_t i = 0; i < n; i += 32) {
    std::uint64_t places = 0x5555555555555555u;
    if (n - i < 32) places &= (std::uint64_t{1} << 2 * (n - i)) - 1;
    std::uint64_t eight[4] = {};
#pragma GCC unroll 4
    for (int p = 0; p < kPlanes; ++p) {
      const std::uint64_t word = scatter_digits(readers[p].read(std::popcount(places)), places);
      for (int b = 0; b < 4; ++b) eight[b] += spread_digits(word >> 16 * b & 0xFFFF);
      places = threes(word);
    }
    std::memcpy(ranks + i, eight, sizeof eight);
    escaped[i / 32] = places;
  }
  std::uint8_t least[kTable], change[kTable];  // from one exponent of the table to the next
  for (int k = 1; k < kTable; ++k) {
    least[k] = k;
    change[k] = table.exponents[k] ^ table.exponents[k - 1];
  }
  const std::uint8_t first = table.exponents[0];
  for (std::size_t i = 0; i < n; ++i) {
    std::uint8_t exponent = first;
#pragma GCC unroll 16
    for (int k = 1; k < kTable; ++k) exponent ^= all_ones(ranks[i] >= least[k]) & change[k];
    exponents[i] = exponent;
  }
  for (std::size_t i = 0; i < n; i += 32)
    for (std::uint64_t left = escaped[i / 32]; left; left &= left - 1)
      exponents[i + std::countr_zero(left) / 2] = static_cast<std::uint8_t>(*escapes++);
}

const BlockKernels kKernels = {{split_float, split_half, split_bfloat},
                               {join_float, join_half, join_bfloat},
                               contains,
                               count,
                               write_digits,
                               count_threes,
                               read_digits};
