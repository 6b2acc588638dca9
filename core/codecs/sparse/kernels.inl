// One cell at a time: n <= kCell elements, read as words of their size. cells.h says what each
// does.

template <class Word>
void select(const std::byte* elements, std::size_t n, std::uint64_t bits, std::uint64_t least,
            std::uint64_t* __restrict mask) {
  alignas(64) std::uint8_t flags[kCell];
  const auto under = static_cast<Word>(bits), from = static_cast<Word>(least);
  for (std::size_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, elements + i * sizeof word, sizeof word);
    flags[i] = static_cast<Word>(word & under) >= from ? 1 : 0;
  }
  if (n % 64) std::memset(flags + n, 0, 64 - n % 64);
  for (std::size_t w = 0; w < (n + 63) / 64; ++w) {
    std::uint64_t found = 0;
    for (std::size_t b = 0; b < 8; ++b) {
      std::uint64_t eight;
      std::memcpy(&eight, flags + 64 * w + 8 * b, sizeof eight);
      found |= (eight * 0x0102040810204080u >> 56) << 8 * b;  // a byte's bit i is flag i
    }
    mask[w] = found;
  }
}

template <class Word>
std::size_t count(const std::byte* elements, std::size_t n, std::uint64_t bits,
                  std::uint64_t least) {
  using Sum =
      std::conditional_t<sizeof(Word) < 4, std::uint32_t, Word>;  // as wide: vectors like it
  const auto under = static_cast<Word>(bits), from = static_cast<Word>(least);
  Sum found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, elements + i * sizeof word, sizeof word);
    found += static_cast<Word>(word & under) >= from ? 1 : 0;
  }
  return found;
}

// The places of the mask's bits, in order.
std::size_t places_of(const std::uint64_t* mask, std::size_t words, std::uint16_t* places) {
  std::size_t found = 0;
  for (std::size_t w = 0; w < words; ++w) {
    std::uint64_t left = mask[w];
    for (; left; left &= left - 1)
      places[found++] = static_cast<std::uint16_t>(64 * w + std::countr_zero(left));
  }
  return found;
}

template <class Word>
void gather(const std::byte* __restrict elements, const std::uint16_t* __restrict places,
            std::size_t n, std::byte* __restrict out) {
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(out + i * sizeof(Word), elements + places[i] * sizeof(Word), sizeof(Word));
}

template <class Word>
void scatter(const std::byte* __restrict elements, const std::uint16_t* __restrict places,
             std::size_t n, std::byte* __restrict out) {
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(out + places[i] * sizeof(Word), elements + i * sizeof(Word), sizeof(Word));
}

template <class Word>
constexpr WordKernels word_kernels() {
  return {select<Word>, count<Word>, gather<Word>, scatter<Word>};
}

const CellKernels kKernels = {{word_kernels<std::uint8_t>(), word_kernels<std::uint16_t>(),
                               word_kernels<std::uint32_t>(), word_kernels<std::uint64_t>()},
                              places_of};
