// Element types. The numbers are part of the wire format: never reuse one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/error.h"

namespace cccl {

enum class DType : std::uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
  kInt8 = 16,
  kInt16 = 17,
  kInt32 = 18,
  kInt64 = 19,
  kUInt8 = 20,
  kUInt16 = 21,
  kUInt32 = 22,
  kUInt64 = 23,
  kBool = 24,
};

struct DTypeInfo {
  DType dtype;
  const char* name;
  std::size_t size;  // bytes
  bool floating;
};

inline constexpr DTypeInfo kDTypes[] = {
    {DType::kFloat32, "float32", 4, true},   {DType::kFloat16, "float16", 2, true},
    {DType::kBFloat16, "bfloat16", 2, true}, {DType::kFloat64, "float64", 8, true},
    {DType::kInt8, "int8", 1, false},        {DType::kInt16, "int16", 2, false},
    {DType::kInt32, "int32", 4, false},      {DType::kInt64, "int64", 8, false},
    {DType::kUInt8, "uint8", 1, false},      {DType::kUInt16, "uint16", 2, false},
    {DType::kUInt32, "uint32", 4, false},    {DType::kUInt64, "uint64", 8, false},
    {DType::kBool, "bool", 1, false},
};

inline bool is_dtype(std::uint8_t value) {
  for (const auto& row : kDTypes)
    if (static_cast<std::uint8_t>(row.dtype) == value) return true;
  return false;
}

inline const DTypeInfo& info(DType dtype) {
  for (const auto& row : kDTypes)
    if (row.dtype == dtype) return row;
  throw UnsupportedError("unknown dtype number " + std::to_string(static_cast<int>(dtype)));
}

inline std::size_t size_of(DType dtype) { return info(dtype).size; }
inline bool is_floating(DType dtype) { return info(dtype).floating; }
inline const char* name_of(DType dtype) { return info(dtype).name; }

}  // namespace cccl
