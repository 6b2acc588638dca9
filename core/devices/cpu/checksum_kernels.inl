// sum over i of word(i) * ((2 (first + i) + 1) mod 2^32), modulo 2^64
std::uint64_t sum_words(const std::byte* bytes, std::size_t words, std::uint32_t first) {
  std::uint64_t sum = 0;
  std::uint32_t weight = 2 * first + 1;
  for (std::size_t i = 0; i < words; ++i, weight += 2) {
    std::uint32_t word;
    std::memcpy(&word, bytes + 4 * i, 4);
    sum += std::uint64_t{word} * weight;
  }
  return sum;
}

constexpr auto* kKernels = sum_words;
