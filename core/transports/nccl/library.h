// libnccl.so.2 as far as it is used here, found when it is first needed: one build serves many
// versions. Declared after NCCL's documentation; the layouts are those that 2.18 and later accept.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstddef>
#include <string>

namespace cccl::nccl {

using Comm = struct ncclComm*;

struct UniqueId {
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kRemoteError = 6,
  kInProgress = 7,
};

// ncclConfig_t of 2.18; later versions complete it.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = 0;
  int cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

inline constexpr int kUint8 = 1;
inline constexpr int kOldest = 21800;  // non-blocking communicators and ncclCommSplit

struct Library {
  std::string path;
  int version = 0;  // 22809 for 2.28.9

  Result (*get_unique_id)(UniqueId*);
  Result (*init)(Comm*, int ranks, UniqueId, int rank, Config*);
  Result (*split)(Comm, int color, int key, Comm*, Config*);
  Result (*async_error)(Comm, Result*);
  Result (*abort)(Comm);
  Result (*destroy)(Comm);
  Result (*send)(const void*, std::size_t, int type, int peer, Comm, cudaStream_t);
  Result (*receive)(void*, std::size_t, int type, int peer, Comm, cudaStream_t);
  Result (*group_start)();
  Result (*group_end)();
  const char* (*error_text)(Result);
  const char* (*last_error)(Comm);
};

// The process's copy; else that of CCCL_NCCL_PATH (a file), NCCL_HOME (a folder), or the system's.
// Throws UnsupportedError where there is none, it is too old, or the process has two.
const Library& library();

}  // namespace cccl::nccl
