#pragma once

#include <cfenv>

namespace cccl {

// Default rounding and no flush-to-zero while it lives: a caller's set_flush_denormal() or
// rounding mode must not change bytes, or ranks would disagree.
class FloatEnvironment {
 public:
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace cccl
