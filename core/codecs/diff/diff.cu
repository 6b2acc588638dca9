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

  void decode(Bytes payload, Values out, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    add({&payload, 1}, out, out.dtype, {}, on.report(), on);
  }

  Values decode_unrounded(Bytes payload, void* memory, ConstValues like,
                          const CudaQueue& on) const override {
    const DType sums = like.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const Values out{memory, like.count, sums};
    add({&payload, 1}, out, like.dtype, {}, nullptr, on);
    return out;
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override;

 private:
  Sources reduce_as(const ReduceArgs& args, Values out, DType dtype,
                    const CudaQueue& on) const override {
    return add(args.payloads, out, dtype, mean_of(args.divisor, dtype), on.report(), on);
  }

  // Payloads of `dtype`: their mean, or the values of one.
  Sources add(std::span<const Bytes> payloads, Values out, DType dtype, std::optional<Mean> mean,
              Report* report, const CudaQueue& on) const;

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

std::size_t DiffOnCuda::encode_sums(ConstValues values, const EncodeArgs& args,
                                    const Sources& sources, const CudaQueue& on) const {
  const CodecCall call(on.device().index);
  const auto seal = seal_of(args);
  const std::size_t count = values.count, cells = cells_of(count);
  const std::size_t most = inner_->max_encoded_bytes(count, args.in.dtype);
  const bool predicted = prediction_.number != 0 && count > 0;
  const DType reals = values.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const std::size_t rest = predicted ? in_chunks(count * size_of(reals)) : 0;
  const std::size_t factors = predicted ? in_chunks(cells) : 0;
  const std::size_t copied = predicted && !has_aligned_elements(values) ? values.bytes() : 0;
  const Scratch scratch(rest + factors + in_chunks(most) + copied, on);
  auto* const memory = static_cast<std::byte*>(scratch.data());
  auto* const codes = reinterpret_cast<std::int8_t*>(memory + rest);
  auto* const inner = memory + rest + factors;
  if (predicted) {
    if (copied) {
      copy(values, inner + in_chunks(most), on);
      values.data = inner + in_chunks(most);
    }
    const SubtractTask task{{static_cast<const std::byte*>(values.data), values.dtype},
                            count,
                            args.position,
                            known(args.in.dtype),
                            memory,
                            codes};
    if (reals == DType::kFloat64)
      launch(subtract_kernel<double>, on, cells, 1, task);
    else
      launch(subtract_kernel<float>, on, cells, 1, task);
    values = {memory, count, reals};
  }
  if (count > 0) {
    auto within = args;
    within.checksum = false;
    within.origin = 0;
    within.out = {inner, most};
    within_->encode_sums(values, within, Sources{}, on);
  }
  const std::size_t bytes = seal.header.body_bytes;
  const AssembleTask task{{args.position, prediction_.number},
                          predicted ? codes : nullptr,
                          cells,
                          inner,
                          inner_begin(count),
                          bytes};
  launch(assemble_kernel, on, (bytes / kPieceBytes + kLanes) / kLanes, 1, task, seal, sources,
         on.workspace());
  return sizeof(PayloadHeader) + bytes;
}

Sources DiffOnCuda::add(std::span<const Bytes> payloads, Values out, DType dtype,
                        std::optional<Mean> mean, Report* report, const CudaQueue& on) const {
  const auto sources = sources_of(payloads, out.count, dtype);
  const DType reals = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const std::size_t stride = in_chunks(out.count * size_of(reals));
  const std::size_t copied = has_aligned_elements(out) ? 0 : out.bytes();
  const Scratch scratch(payloads.size() * stride + copied, on);
  auto* const terms = static_cast<std::byte*>(scratch.data());
  // Its kernels take any 64 bytes for a header where nobody wants a report.
  const std::size_t begin = inner_begin(out.count),
                    most = inner_->max_encoded_bytes(out.count, dtype);
  std::vector<Bytes> within;
  for (const Bytes payload : payloads) within.push_back(payload.subspan(begin, most));
  if (out.count > 0)
    within_->decode_all_unrounded(within, terms, stride, {nullptr, out.count, dtype}, on);
  auto* const to = copied ? terms + payloads.size() * stride : static_cast<std::byte*>(out.data);
  const AddTask task{terms,     stride,    known(dtype),     to,
                     out.dtype, out.count, mean.has_value(), mean.value_or(Mean{})};
  if (reals == DType::kFloat64)
    launch(add_kernel<double>, on, tiles_of(out.count), 1, task, sources, on.workspace(), report);
  else
    launch(add_kernel<float>, on, tiles_of(out.count), 1, task, sources, on.workspace(), report);
  if (copied) copy({to, out.count, out.dtype}, out.data, on);
  return sources;
}

}  // namespace

std::shared_ptr<const Codec> diff_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<DiffOnCuda>(std::move(codec));
}

}  // namespace cccl
