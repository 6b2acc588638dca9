// sparse on CUDA devices: the bytes of FORMAT.md, as the CPU's. Elements kept as they are have
// kernels of their own; what another codec makes of the values held passes through memory.
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "codecs/sparse/decode.cuh"
#include "codecs/sparse/encode.cuh"
#include "devices/cuda/codec.cuh"

namespace cccl {
namespace {

using namespace cuda;
using namespace sparse;

template <class Use>
void with_word(std::size_t size, Use use) {
  switch (size) {
    case 1: return use(std::uint8_t{});
    case 2: return use(std::uint16_t{});
    case 4: return use(std::uint32_t{});
    default: return use(std::uint64_t{});
  }
}

// Magnitudes of a floating-point type, as integers, which order as they do.
struct Magnitudes {
  std::uint64_t bits, infinity;

  static Magnitudes of(DType dtype) {
    switch (dtype) {
      case DType::kFloat16: return {0x7FFF, 0x7C00};
      case DType::kBFloat16: return {0x7FFF, 0x7F80};
      case DType::kFloat64: return {0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000};
      default: return {0x7FFFFFFF, 0x7F800000};
    }
  }
};

// The least magnitude of that type which is no less than `threshold`, as a float or double.
std::uint64_t least_from(double threshold, DType dtype) {
  if (dtype == DType::kFloat64) return std::bit_cast<std::uint64_t>(threshold);
  const auto single = static_cast<float>(threshold);
  if (dtype == DType::kFloat32) return std::bit_cast<std::uint32_t>(single);
  const bool half = dtype == DType::kFloat16;
  const std::uint16_t near = half ? float_to_half(single) : float_to_bfloat(single);
  return near + ((half ? half_to_float(near) : bfloat_to_float(near)) < single);
}

class SparseOnCuda final : public SummingCodec {
 public:
  explicit SparseOnCuda(std::shared_ptr<const Codec> codec)
      : SummingCodec(codec),
        settings_(settings_of(*codec)),
        inner_(codec_on(DeviceKind::kCuda, sparse::inner_of(*codec))),
        within_(dynamic_cast<const CudaCodec&>(*inner_)),
        keeps_elements_(inner_->info().lossless) {
    within_.body_size(DType::kFloat32);  // throws if it has none
  }

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override {
    return encode_sums(args.in, args, Sources{}, cuda_queue(queue));
  }

  void decode(Bytes payload, Values out, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    decode_as(payload, out, out.dtype, on.report(), on);
  }

  Values decode_unrounded(Bytes payload, void* memory, ConstValues like,
                          const CudaQueue& on) const override {
    const bool wide = !keeps_elements_ && like.dtype != DType::kFloat64;
    const Values out{memory, like.count, wide ? DType::kFloat32 : like.dtype};
    decode_as(payload, out, like.dtype, nullptr, on);
    return out;
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override;

 private:
  // Where the cells of payloads begin, and what the inner codec makes of them.
  class Located {
   public:
    Located(const SparseOnCuda& codec, const Sources& sources, std::size_t count, DType dtype,
            const CudaQueue& on);
    DecodeTask task(Values out) const {
      return {static_cast<std::byte*>(out.data),
              out.count,
              cells_,
              sizeof(Entry) * cells_,
              size_,
              all_aligned(out.data),
              groups_,
              groups_at(),
              values_at()};
    }

   private:
    // The scratch memory, part by part; all begin at multiples of 16.
    std::byte* at(std::size_t offset) const {
      return static_cast<std::byte*>(scratch_.data()) + offset;
    }
    std::uint64_t* groups_at() const {
      return reinterpret_cast<std::uint64_t*>(at(groups_offset_));
    }
    float* values_at() const { return reinterpret_cast<float*>(at(values_offset_)); }

    std::uint64_t payloads_, cells_, groups_, turns_;
    bool decodes_;  // by the inner codec
    BodySize size_;
    std::size_t zeros_, groups_offset_, places_offset_, values_offset_, bytes_;
    Scratch scratch_;
  };

  // Of a payload of `dtype`.
  void decode_as(Bytes payload, Values out, DType dtype, Report* report,
                 const CudaQueue& on) const {
    const auto sources = sources_of({&payload, 1}, out.count, dtype);
    const Located located(*this, sources, out.count, dtype, on);
    const auto task = located.task(out);
    const auto run = [&]<class Element, class Out, bool kHeld>() {
      launch_with(kMemory<Element>, decode_sparse<Element, Out, kHeld>, on,
                  task.cells * kWarps / kCellsOfBlock<Element>, 1, task, sources, on.workspace(),
                  report);
    };
    if (keeps_elements_)
      with_word(size_of(out.dtype),
                [&]<class Word>(Word) { run.template operator()<Word, Word, false>(); });
    else
      with_float_type(out.dtype,
                      [&]<class Out>(Out) { run.template operator()<float, Out, true>(); });
  }

  EncodeTask encode_task(ConstValues values, DType dtype) const;
  CellLimits limits(std::size_t n, const BodySize& size) const;
  Sources reduce_as(const ReduceArgs& args, Values out, DType dtype,
                    const CudaQueue& on) const override;

  Settings settings_;
  std::shared_ptr<const Codec> inner_;
  const CudaCodec& within_;  // inner_
  bool keeps_elements_;
};

std::size_t in_chunks(std::size_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
}

CellLimits SparseOnCuda::limits(std::size_t n, const BodySize& size) const {
  const auto values = static_cast<double>(n);
  return {static_cast<std::uint32_t>(std::floor(settings_.sparsity * values)) + 1,
          static_cast<std::uint32_t>(std::ceil(settings_.top_k * values)),
          size.padded(static_cast<std::uint32_t>(n))};
}

// `dtype`: of what is written. `values` may be sums.
EncodeTask SparseOnCuda::encode_task(ConstValues values, DType dtype) const {
  EncodeTask task{};
  task.values = static_cast<const std::byte*>(values.data);
  task.count = values.count;
  task.cells = cells_of(values.count);
  task.directory = sizeof(Entry) * task.cells;
  task.size = within_.body_size(dtype);
  task.whole = limits(kCell, task.size);
  task.last = limits(values.count % kCell, task.size);
  task.aligned = all_aligned(values.data);
  task.infinity = std::numeric_limits<std::uint32_t>::max();
  return task;
}

// Returns the most bytes that the payload may have: its header will say.
std::size_t SparseOnCuda::encode_sums(ConstValues values, const EncodeArgs& args,
                                      const Sources& sources, const CudaQueue& on) const {
  const CodecCall call(on.device().index);
  const DType dtype = args.in.dtype;
  const auto seal = seal_of(args);
  const bool same = values.dtype == dtype, drops = settings_.drops();
  // Sums that are rounded after some were dropped take the way of other codecs.
  const bool held = !keeps_elements_ || (drops && !same);
  auto task = encode_task(values, dtype);

  // What elements are while they are selected: floats on the way to another codec.
  const DType selected = held && values.dtype != DType::kFloat64 ? DType::kFloat32 : dtype;
  const auto [bits, infinity] = Magnitudes::of(selected);
  task.selection = {bits, 1, infinity, settings_.top_k > 0};
  if (!held && !drops) task.selection.bits = ~std::uint64_t{0};
  if (settings_.threshold > 0)
    task.selection.least = std::max<std::uint64_t>(1, least_from(settings_.threshold, selected));
  if (!held) task.exponents = exponents_of(dtype);
  // A float from here on becomes an Inf in bfloat16.
  if (held && keeps_elements_ && dtype == DType::kBFloat16) task.infinity = 0x7F7F8000u;

  const auto cells_of_block = static_cast<std::uint64_t>(
      held ? (values.dtype == DType::kFloat64 ? kCellsOfBlock<double> : kCellsOfBlock<float>)
           : (size_of(dtype) == 8 ? kCellsOfBlock<double> : kCellsOfBlock<float>));
  task.turns = (task.cells + cells_of_block - 1) / cells_of_block;
  const std::size_t zeros = in_chunks(sizeof(Control) + task.turns * sizeof(std::uint64_t));
  const std::size_t places = held ? task.cells * sizeof(Cell) : 0;
  const Scratch scratch(zeros + places + (held ? task.cells * kCell * sizeof(float) : 0), on);
  auto* const memory = static_cast<std::byte*>(scratch.data());
  CCCLIB_CUDA(cudaMemsetAsync, memory, 0, zeros, on.stream());
  task.control = reinterpret_cast<Control*>(memory);
  task.known = reinterpret_cast<unsigned long long*>(task.control + 1);
  task.places = reinterpret_cast<Cell*>(memory + zeros);
  task.held = reinterpret_cast<float*>(memory + zeros + places);

  const auto run = [&]<class Source, class Element, bool kHeld>() {
    launch_with(kMemory<Element>, encode_sparse<Source, Element, kHeld>, on, task.turns * kWarps, 1,
                task, seal, sources, on.workspace());
  };
  if (held) {
    with_float_type(values.dtype, [&]<class T>(T) {
      if constexpr (sizeof(T) == 2)
        run.template operator()<T, float, true>();
      else
        run.template operator()<WordOf<T>, WordOf<T>, true>();
    });
    const CellsToEncode cells{task.held,     task.places, task.cells,
                              args.position, task.size,   &task.control->begun};
    within_.encode_cells(cells, args, seal, sources, on);
  } else if (same) {
    with_word(size_of(dtype),
              [&]<class Word>(Word) { run.template operator()<Word, Word, false>(); });
  } else if (dtype == DType::kFloat16) {
    run.template operator()<float, Half, false>();
  } else {
    run.template operator()<float, BFloat, false>();
  }
  return sizeof(PayloadHeader) + seal.header.body_bytes;
}

SparseOnCuda::Located::Located(const SparseOnCuda& codec, const Sources& sources, std::size_t count,
                               DType dtype, const CudaQueue& on)
    : payloads_(sources.count),
      cells_(cells_of(count)),
      groups_((cells_ + kGroup - 1) / kGroup),
      turns_((groups_ + kWarps - 1) / kWarps),
      decodes_(!codec.keeps_elements_),
      size_(codec.within_.body_size(dtype)),
      zeros_(in_chunks(payloads_ * (turns_ * sizeof(std::uint64_t) + sizeof(unsigned int)))),
      groups_offset_(zeros_),
      places_offset_(groups_offset_ + in_chunks(payloads_ * groups_ * sizeof(std::uint64_t))),
      values_offset_(places_offset_ + (decodes_ ? payloads_ * cells_ * sizeof(Cell) : 0)),
      bytes_(values_offset_ + (decodes_ ? payloads_ * cells_ * kCell * sizeof(float) : 0)),
      scratch_(bytes_, on) {
  // The first group begins behind the directory.
  if (groups_ == 0 || (groups_ == 1 && !decodes_)) return;
  CCCLIB_CUDA(cudaMemsetAsync, at(0), 0, zeros_, on.stream());
  auto* const known = reinterpret_cast<unsigned long long*>(at(0));
  auto* const places = reinterpret_cast<Cell*>(at(places_offset_));
  const LocateTask locate{count,
                          cells_,
                          groups_,
                          turns_,
                          sizeof(Entry) * cells_,
                          size_,
                          reinterpret_cast<unsigned int*>(known + payloads_ * turns_),
                          known,
                          groups_at(),
                          decodes_ ? places : nullptr};
  launch(locate_cells, on, groups_, payloads_, locate, sources);
  if (decodes_)
    codec.within_.decode_cells({values_at(), places, cells_, size_}, dtype, sources, on);
}

Sources SparseOnCuda::reduce_as(const ReduceArgs& args, Values out, DType dtype,
                                const CudaQueue& on) const {
  const auto sources = sources_of(args.payloads, out.count, dtype);
  const Located located(*this, sources, out.count, dtype, on);
  const auto task = located.task(out);
  const auto run = [&]<class Element, class Out, bool kHeld>() {
    launch_with(kMemory<Element>, sum_sparse<Element, Out, kHeld>, on,
                task.cells * kWarps / kCellsOfBlock<Element>, 1, task, mean_of(args.divisor, dtype),
                sources, on.workspace(), on.report());
  };
  with_float_type(out.dtype, [&]<class Out>(Out) {
    if (!keeps_elements_) return run.template operator()<float, Out, true>();
    if (out.dtype == dtype) return run.template operator()<Out, Out, false>();
    if constexpr (std::is_same_v<Out, float>)
      dtype == DType::kFloat16 ? run.template operator()<Half, Out, false>()
                               : run.template operator()<BFloat, Out, false>();
  });
  return sources;
}

}  // namespace

std::shared_ptr<const Codec> sparse_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<SparseOnCuda>(std::move(codec));
}

}  // namespace cccl
