// In sixteen sums, so that every instruction set adds in the same order.
template <class Real>
Real product(const Real* a, const Real* b, std::size_t n) {
  Real sums[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (std::size_t lane = 0; lane < kSums; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (std::size_t lane = 0; i + lane < n; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  Real total = 0;
  for (const Real sum : sums) total += sum;
  return total;
}

template <class Real>
void subtract(const Real* values, const Real* prediction, Real scale, std::size_t n, Real* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = values[i] - scale * prediction[i];
}

// Values that the sum of finite terms cannot hold become the largest; Inf and NaN stay.
template <class Real>
void add_back(const Real* prediction, Real scale, std::size_t n, Real* values) {
  constexpr Real kMost = std::numeric_limits<Real>::max();
  for (std::size_t i = 0; i < n; ++i) {
    const Real difference = values[i], sum = difference + scale * prediction[i];
    const Real held = sum > kMost ? kMost : sum < -kMost ? -kMost : sum;
    values[i] = std::abs(difference) <= kMost ? held : difference;
  }
}

template <class Real>
Real largest(const Real* values, std::size_t n) {
  Real most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Real magnitude = std::abs(values[i]);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

const DiffKernels kKernels = {
    {product<float>, subtract<float>, add_back<float>, largest<float>},
    {product<double>, subtract<double>, add_back<double>, largest<double>}};
