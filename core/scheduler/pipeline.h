// Runs a plan: codecs on a queue, payloads over a transport, buffers from a pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "api/codec.h"
#include "api/device.h"
#include "api/noise.h"
#include "api/residual.h"
#include "api/transport.h"
#include "scheduler/plan.h"
#include "scheduler/pool.h"

namespace cccl {

// Told where the host begins and ends to submit a kind of work: "cccl_compress",
// "cccl_communicate" or "cccl_decompress".
using RangeObserver = std::function<void(const char* name, bool begins)>;

// Whether the values decide how long some payloads of the plan are.
bool sends_any_size(const PlanArgs& plan, const Codec& contribution, const Codec& result);

struct PipelineJob {
  ConstValues in;
  Values out;
  const Codec* contribution;
  const Codec* result;
  double divisor = 1;
  std::uint64_t contribution_seed = 0, result_seed = 0;
  const std::uint64_t* runs = nullptr;  // EncodeArgs::runs
  bool checksum = true;
  bool measures_noise = false;                   // of an all_reduce in two shots
  bool timed = true;                             // measures times and a sample's error
  bool debug = false;                            // the host waits for, and checks, every step
  std::function<Findings()> findings = nullptr;  // what it then looks at
  std::uint32_t tag = 0;
  Seconds deadline{0};
  std::vector<std::shared_ptr<Event>> earlier = {};  // SizesJob::earlier
  RangeObserver observer = nullptr;
  // Of this rank's contributions, and of the results it makes.
  std::optional<Residual> sender, owner;
  Values prediction;  // takes the output, if there is memory: what was read of it before is in use
};

// What one run moved and where its time went, in seconds of its queue.
struct RunStats {
  std::uint64_t bytes_sent = 0, bytes_received = 0, messages = 0;
  double encode = 0, reduce = 0, decode = 0, exposed = 0, total = 0;
  // Of a sample of the first payload: sum of squared errors and of squares. 0 / 0 where there is
  // none.
  double error_squares = 0, squares = 0;
  bool non_finite = false;
  int origin = -1;  // first rank with a non-finite contribution, where known
  Noise noise;      // as the headers of all results say, the same on all ranks
};

// A run whose work may still be under way on its queue.
struct PipelineRun {
  struct Span {
    double RunStats::* field;
    std::unique_ptr<Event> begin, end;
  };
  struct Statistics {  // of results that were decoded together
    std::shared_ptr<const std::uint64_t> numbers;
    std::vector<std::size_t> counts;  // values of each
  };
  RunStats stats;
  std::vector<Span> spans;
  std::vector<Statistics> statistics;
  std::unique_ptr<ErrorSample> sample;
  bool sent_non_finite = false;  // by this rank, looked for where it keeps a residual

  void settle();  // completes stats, once the queue is past the run
};

PipelineRun run_pipeline(const Plan& plan, const PipelineJob& job, Transport& transport,
                         const Platform& platform, Queue& queue, Pool& pool);

}  // namespace cccl
