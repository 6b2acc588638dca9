void correct_floats(const float* values, const float* kept, float decay, std::size_t n,
                    float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = values[i] + decay * kept[i];
}

void subtract_floats(const float* values, const float* decoded, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = values[i] - decoded[i];
}

const ResidualKernels kKernels = {correct_floats, subtract_floats};
