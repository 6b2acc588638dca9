// diff on CUDA devices: the bytes of FORMAT.md, as the CPU's. A kernel leaves in memory what the
// prediction does not say, the inner codec encodes that, and another puts the payload together.
#include "codecs/diff/diff.cuh"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "devices/cuda/codec.cuh"

namespace cccl {
namespace {

using namespace cuda;
using namespace diff;

std::size_t in_chunks(std::size_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
}

bool has_aligned_elements(ConstValues values) {
  return reinterpret_cast<std::uintptr_t>(values.data) % size_of(values.dtype) == 0;
}

void copy(ConstValues from, void* to, const CudaQueue& on) {
  CCCLIB_CUDA(cudaMemcpyAsync, to, from.data, from.bytes(), cudaMemcpyDeviceToDevice, on.stream());
}

class DiffOnCuda final : public SummingCodec {
 public:
  explicit DiffOnCuda(std::shared_ptr<const Codec> codec)
      : SummingCodec(codec),
        inner_(codec_on(DeviceKind::kCuda, diff::inner_of(*codec))),
        within_(&dynamic_cast<const CudaCodec&>(*inner_)) {}

  std::shared_ptr<const Codec> with_prediction(const Prediction& prediction) const override {
    auto informed = std::make_shared<DiffOnCuda>(*this);
    informed->prediction_ = prediction;
    return informed;
  }

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override {
    return encode_sums(args.in, args, Sources{}, cuda_queue(queue));
  }

  void encode_all(std::span<const EncodeArgs> parts, Queue& queue) const override {
    for_alike(
        parts, [](const EncodeArgs& args) { return std::pair(args.in.count, args.in.dtype); },
        [&](auto alike) { encode_together(alike, {}, Sources{}, cuda_queue(queue)); });
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override {
    return encode_together({&args, 1}, values, sources, on);
  }

  void decode(Bytes payload, Values out, Queue& queue) const override {
    const DecodeArgs args{payload, out};
    decode_all({&args, 1}, queue);
  }

  void decode_all(std::span<const DecodeArgs> parts, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    for_alike(
        parts, [](const DecodeArgs& args) { return std::pair(args.out.count, args.out.dtype); },
        [&](auto alike) {
          std::vector<Bytes> payloads;
          std::vector<Values> outs;
          for (const auto& [payload, out] : alike) {
            payloads.push_back(payload);
            outs.push_back(out);
          }
          add(payloads, outs, outs[0].dtype, {}, on.report(), on);
        });
  }

  Values decode_unrounded(Bytes payload, void* memory, ConstValues like,
                          const CudaQueue& on) const override {
    const Values out{memory, like.count, sums_of(like.dtype)};
    add({&payload, 1}, {&out, 1}, like.dtype, {}, nullptr, on);
    return out;
  }

 private:
  Sources reduce_as(const ReduceArgs& args, Values out, DType dtype,
                    const CudaQueue& on) const override {
    return add(args.payloads, {&out, 1}, dtype, mean_of(args.divisor, dtype), on.report(), on);
  }

  // Of the same count and dtype; `sums`: instead of the values of the one part. Returns a payload's
  // size.
  std::size_t encode_together(std::span<const EncodeArgs> args, std::optional<ConstValues> sums,
                              const Sources& sources, const CudaQueue& on) const;

  // Payloads of `dtype`: their mean in the one of `outs`, or the values of each.
  Sources add(std::span<const Bytes> payloads, std::span<const Values> outs, DType dtype,
              std::optional<Mean> mean, Report* report, const CudaQueue& on) const;

  // Of values of `dtype`.
  Known known(DType dtype) const {
    const auto& values = prediction_.values;
    if (prediction_.number != 0 && (values.dtype != dtype || !has_aligned_elements(values)))
      throw UnsupportedError(std::string("on a CUDA device a prediction of ") + name_of(dtype) +
                             " values has that dtype, at an aligned address");
    return {{static_cast<const std::byte*>(values.data), values.dtype},
            values.count,
            prediction_.number};
  }

  std::shared_ptr<const Codec> inner_;
  const CudaCodec* within_;  // inner_
  Prediction prediction_;
};

std::size_t DiffOnCuda::encode_together(std::span<const EncodeArgs> args,
                                        std::optional<ConstValues> sums, const Sources& sources,
                                        const CudaQueue& on) const {
  const CodecCall call(on.device().index);
  const auto first = sums.value_or(args[0].in);
  const std::size_t count = first.count, cells = cells_of(count);
  const bool predicted = prediction_.number != 0 && count > 0;
  const DType reals = sums_of(first.dtype);

  // The scratch memory of a part; all begin at multiples of 16.
  const std::size_t most = inner_->max_encoded_bytes(count, args[0].in.dtype);
  const std::size_t rest = predicted ? in_chunks(count * size_of(reals)) : 0;
  const std::size_t factors = predicted ? in_chunks(cells) : 0;
  const std::size_t copied = predicted ? in_chunks(first.bytes()) : 0;
  bool aligned = true;
  for (const auto& each : args) aligned &= has_aligned_elements(sums.value_or(each.in));
  const std::size_t stride = rest + factors + in_chunks(most) + (aligned ? 0 : copied);
  const Scratch scratch(args.size() * stride, on);

  SubtractTask subtract{first.dtype, count, {}, {}};
  AssembleTask assemble{cells, inner_begin(count), 0, {}};
  for (std::size_t i = 0; i < args.size(); ++i) {
    auto* const memory = static_cast<std::byte*>(scratch.data()) + i * stride;
    auto* const codes = reinterpret_cast<std::int8_t*>(memory + rest);
    auto* const inner = memory + rest + factors;
    auto values = sums.value_or(args[i].in);
    if (predicted && !aligned) {
      copy(values, inner + in_chunks(most), on);
      values.data = inner + in_chunks(most);
    }
    subtract.parts.parts[i] = {static_cast<const std::byte*>(values.data), args[i].position, memory,
                               codes};
    assemble.parts.parts[i] = {{args[i].position, prediction_.number},
                               predicted ? codes : nullptr,
                               inner,
                               seal_of(args[i])};
  }
  if (predicted) {
    subtract.known = known(args[0].in.dtype);
    const auto kernel = reals == DType::kFloat64 ? subtract_kernel<double> : subtract_kernel<float>;
    launch(kernel, on, cells, args.size(), subtract);
  }
  for (std::size_t i = 0; i < args.size() && count > 0; ++i) {
    auto within = args[i];
    within.checksum = false;
    within.origin = 0;
    within.out = {const_cast<std::byte*>(assemble.parts.parts[i].inner), most};
    const ConstValues left{subtract.parts.parts[i].rest, count, reals};
    within_->encode_sums(predicted ? left : sums.value_or(within.in), within, Sources{}, on);
  }
  assemble.bytes = assemble.parts.parts[0].seal.header.body_bytes;
  launch(assemble_kernel, on, (assemble.bytes / kPieceBytes + kLanes) / kLanes, args.size(),
         assemble, sources, on.workspace());
  return sizeof(PayloadHeader) + assemble.bytes;
}

Sources DiffOnCuda::add(std::span<const Bytes> payloads, std::span<const Values> outs, DType dtype,
                        std::optional<Mean> mean, Report* report, const CudaQueue& on) const {
  const std::size_t count = outs[0].count;
  const auto sources = sources_of(payloads, count, dtype);
  const DType reals = sums_of(dtype);
  bool aligned = true;
  for (const Values& out : outs) aligned &= has_aligned_elements(out);
  const std::size_t stride = in_chunks(count * size_of(reals));
  const std::size_t copied = aligned ? 0 : in_chunks(outs[0].bytes());
  const Scratch scratch(payloads.size() * stride + outs.size() * copied, on);
  auto* const terms = static_cast<std::byte*>(scratch.data());
  auto* const copies = terms + payloads.size() * stride;

  // The inner codec's kernels take any bytes for a header where nobody wants a report.
  const std::size_t begin = inner_begin(count), most = inner_->max_encoded_bytes(count, dtype);
  std::vector<Bytes> within;
  for (const Bytes payload : payloads) within.push_back(payload.subspan(begin, most));
  if (count > 0) within_->decode_all_unrounded(within, terms, stride, {nullptr, count, dtype}, on);

  AddTask task{terms,         stride, known(dtype),     {},
               outs[0].dtype, count,  mean.has_value(), mean.value_or(Mean{})};
  for (std::size_t i = 0; i < outs.size(); ++i)
    task.outs[i] = aligned ? static_cast<std::byte*>(outs[i].data) : copies + i * copied;
  const auto kernel = reals == DType::kFloat64 ? add_kernel<double> : add_kernel<float>;
  launch(kernel, on, tiles_of(count), outs.size(), task, sources, on.workspace(), report);
  if (!aligned)
    for (std::size_t i = 0; i < outs.size(); ++i)
      copy({task.outs[i], count, outs[i].dtype}, outs[i].data, on);
  return sources;
}

}  // namespace

std::shared_ptr<const Codec> diff_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<DiffOnCuda>(std::move(codec));
}

}  // namespace cccl
