template <class Stored, auto kConvert>
inline void load_as(const void* from, std::size_t n, float* to) {
  const auto* bytes = static_cast<const std::byte*>(from);
  for (std::size_t i = 0; i < n; ++i) {
    Stored stored;
    std::memcpy(&stored, bytes + i * sizeof stored, sizeof stored);
    to[i] = kConvert(stored);
  }
}

template <class Stored, auto kConvert>
inline void store_as(const float* from, std::size_t n, void* to) {
  auto* bytes = static_cast<std::byte*>(to);
  for (std::size_t i = 0; i < n; ++i) {
    const Stored stored = kConvert(from[i]);
    std::memcpy(bytes + i * sizeof stored, &stored, sizeof stored);
  }
}

void load_half(const void* from, std::size_t n, float* to) {
  load_as<std::uint16_t, half_to_float>(from, n, to);
}
void load_bfloat(const void* from, std::size_t n, float* to) {
  load_as<std::uint16_t, bfloat_to_float>(from, n, to);
}
void load_double(const void* from, std::size_t n, float* to) {
  load_as<double, narrow>(from, n, to);
}
void store_half(const float* from, std::size_t n, void* to) {
  store_as<std::uint16_t, float_to_half>(from, n, to);
}
void store_bfloat(const float* from, std::size_t n, void* to) {
  store_as<std::uint16_t, float_to_bfloat>(from, n, to);
}
void store_double(const float* from, std::size_t n, void* to) {
  store_as<double, widen>(from, n, to);
}

void add_float(const float* term, std::size_t n, float* total) {
  for (std::size_t i = 0; i < n; ++i) total[i] += term[i];
}

void divide_float(float divisor, float* values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) values[i] /= divisor;
}

void multiply_float(float factor, float* values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) values[i] *= factor;
}

std::uint32_t largest_magnitude(const float* values, std::size_t n) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

const ConvertKernels kKernels = {load_half,      load_bfloat,      load_double, store_half,
                                 store_bfloat,   store_double,     add_float,   divide_float,
                                 multiply_float, largest_magnitude};
