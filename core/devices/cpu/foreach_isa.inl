// Compiles the file named by CCCLIB_KERNELS once per instruction set, each in a namespace of its
// own. Include it inside an unnamed namespace, after every header that the kernels need.
// CCCLIB_BMI2 is defined where that instruction set is there.
namespace baseline {
#include CCCLIB_KERNELS
}  // namespace baseline

#if defined(__x86_64__) && (defined(__clang__) || defined(__GNUC__))
#define CCCLIB_BMI2
#endif
#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2"))), apply_to = function)
namespace avx2 {
#include CCCLIB_KERNELS
}  // namespace avx2
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2"))), \
                             apply_to = function)
namespace avx512 {
#include CCCLIB_KERNELS
}  // namespace avx512
#pragma clang attribute pop
#elif defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,bmi2")
namespace avx2 {
#include CCCLIB_KERNELS
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512")
namespace avx512 {
#include CCCLIB_KERNELS
}  // namespace avx512
#pragma GCC pop_options
#else
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif
#undef CCCLIB_BMI2
#undef CCCLIB_KERNELS
