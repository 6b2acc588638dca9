// Bytes between GPUs over NCCL's sends and receives. A build without CUDA has the same functions
// (absent.cpp), which refuse.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "api/transport.h"
#include "transports/side_channel.h"

namespace cccl::nccl {

struct Options {
  int rank = 0, size = 1, device = 0;
  int lanes = 2;        // communicators in turn: one's transfers begin while another's end
  int max_ctas = 0;     // thread blocks that NCCL may take per communicator; 0: its own choice
  bool direct = true;   // without NCCL where ranks reach each other's memory
  Seconds deadline{0};  // to connect, and for what NCCL does before it launches
};

// Connects, and loads NCCL, when it is first asked to move something: that throws UnsupportedError
// without a usable library, DeadlineError or TransportError.
std::shared_ptr<Transport> make_transport(const Options& options, SideChannel side_channel);

// Of the library that would be used. Throws UnsupportedError.
struct Version {
  int number;  // 22809
  std::string path;
};
Version version();

// 2.28.9
inline std::string text_of_version(int version) {
  const int unit = version < 10000 ? 1000 : 10000;  // the scheme changed with 2.9
  return std::to_string(version / unit) + "." + std::to_string(version % unit / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace cccl::nccl
