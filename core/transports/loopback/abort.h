// Where ranks are threads: which of them gave up first, and why.
#pragma once

#include <string>

#include "api/error.h"

namespace cccl {

struct Abort {
  int by = -1;
  std::string reason;

  explicit operator bool() const { return by >= 0; }

  void note(int rank, const std::string& why) {
    if (*this) return;
    by = rank;
    reason = why;
  }

  // Throws what `rank` is told.
  void check(int rank) const {
    if (by == rank) throw ClosedError("this rank aborted: " + reason);
    if (*this) throw PeerAbortedError("rank " + std::to_string(by) + " aborted: " + reason);
  }
};

}  // namespace cccl
