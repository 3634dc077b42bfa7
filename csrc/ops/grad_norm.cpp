// grad_norm and grad_scale_: lists of gradients of any dtypes, in memory order, on one device.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "../multi_tensor.h"
#include "adam.h"
#include "tensors.h"

namespace fusedops {

namespace {

// Few enough chunks for one block to add their sums quickly, small enough ones to end together.
constexpr int64_t kChunk = 16384;
constexpr int64_t kMaxChunks = 8192;
constexpr int64_t kSerial = 65536;  // elements below which another CPU thread does not pay

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

c10::Device check_gradients(const Gradients& grads) {
  const c10::Device device = grads.front()->device();
  check_device_is_served(device);
  for (const at::Tensor* const given : grads) {
    const at::Tensor& grad = *given;
    TORCH_CHECK_VALUE(grad.device() == device, "grads: expected all on ", device, " as the first, got one on ",
                      grad.device());
    TORCH_CHECK_VALUE(grad.layout() == at::kStrided && is_float_dtype(grad.scalar_type()),
                      "grads: expected dense float32, float16, bfloat16 or float64 tensors, got ", grad.scalar_type(),
                      " with layout ", grad.layout());
    if (!grad._is_zerotensor()) check_memory("grads", grad);
  }
  return device;
}

bool in_memory_order(const at::Tensor& grad) { return grad.is_non_overlapping_and_dense() && !grad.is_neg(); }

TensorSpan span_of(const at::Tensor& grad) {
  return {const_cast<void*>(grad.const_data_ptr()), static_cast<uint64_t>(grad.numel()),
          static_cast<uint64_t>(dtype_of(grad))};
}

struct SpanList {
  std::vector<TensorSpan> spans;  // the gradients that have elements
  int64_t numel = 0;
  int64_t chunk_size = kChunk;
  std::vector<uint32_t> first = {0};  // first chunk of each, then the number of chunks

  explicit SpanList(const Gradients& grads) {
    spans.reserve(grads.size());
    for (const at::Tensor* const grad : grads) {
      if (grad->numel() == 0) continue;
      spans.push_back(span_of(*grad));
      numel += grad->numel();
    }
    chunk_size *= std::max<int64_t>(1, divide_up(numel, kMaxChunks * kChunk));
    first.reserve(spans.size() + 1);
    for (const TensorSpan& span : spans) {
      first.push_back(first.back() + static_cast<uint32_t>(divide_up(static_cast<int64_t>(span.numel), chunk_size)));
    }
  }

  int64_t chunk_count() const { return first.back(); }

  // Calls work(chunk, span, its first element, elements) for all chunks, on all threads.
  template <class Work>
  void for_each_chunk(const Work& work) const {
    at::parallel_for(0, chunk_count(), numel < kSerial ? chunk_count() : 1, [&](int64_t begin, int64_t end) {
      auto t = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), begin) - first.begin()) - 1;
      for (int64_t c = begin; c < end; ++c) {
        while (c >= first[t + 1]) ++t;
        const int64_t start = (c - first[t]) * chunk_size;
        work(c, spans[t], start, std::min(chunk_size, static_cast<int64_t>(spans[t].numel) - start));
      }
    });
  }
};

void* element(const TensorSpan& span, int64_t i) {
  return static_cast<char*>(span.data) + i * size_of(static_cast<DType>(span.dtype));
}

#ifdef FUSEDOPS_WITH_CUDA

struct DeviceSpans {
  at::Tensor spans;
  at::Tensor chunks;
};

DeviceSpans upload(const SpanList& list, c10::Device device, cudaStream_t stream) {
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(device);
  const auto spans_bytes = static_cast<int64_t>(list.spans.size() * sizeof(TensorSpan));
  const auto first_bytes = static_cast<int64_t>(list.first.size() * sizeof(uint32_t));
  DeviceSpans device_spans = {at::empty({spans_bytes}, bytes),
                              at::empty({list.chunk_count() * static_cast<int64_t>(sizeof(cuda::Chunk))}, bytes)};
  const at::Tensor first = at::empty({first_bytes}, bytes);
  check_launch(
      cuda::upload(device_spans.spans.mutable_data_ptr(), list.spans.data(), static_cast<size_t>(spans_bytes), stream));
  check_launch(cuda::upload(first.mutable_data_ptr(), list.first.data(), static_cast<size_t>(first_bytes), stream));
  check_launch(cuda::expand_chunks({static_cast<cuda::Chunk*>(device_spans.chunks.mutable_data_ptr()),
                                    static_cast<const uint32_t*>(first.const_data_ptr()),
                                    static_cast<int64_t>(list.spans.size()), list.chunk_count()},
                                   stream));
  return device_spans;
}

// The last table of each stream: gradients mostly keep their addresses from step to step. A captured graph records its
// own upload instead.
DeviceSpans device_spans(const SpanList& list, c10::Device device, cudaStream_t stream) {
  if (cuda::is_capturing(stream)) return upload(list, device, stream);
  struct Uploaded {
    std::vector<TensorSpan> spans;
    DeviceSpans on_device;
  };
  static std::mutex mutex;
  static auto* const cache =
      new std::map<std::pair<int, cudaStream_t>, Uploaded>();  // never destroyed: CUDA is gone before statics are
  const std::lock_guard<std::mutex> lock(mutex);
  Uploaded& last = (*cache)[{device.index(), stream}];
  const size_t count = list.spans.size();
  const bool same = last.on_device.spans.defined() && last.spans.size() == count &&
                    (count == 0 || std::memcmp(last.spans.data(), list.spans.data(), count * sizeof(TensorSpan)) == 0);
  if (!same) last = {list.spans, upload(list, device, stream)};
  return last.on_device;
}

#endif

}  // namespace

at::Tensor grad_norm(const Gradients& grads, const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  if (grads.empty()) {
    const c10::Device device = grad_scale  ? grad_scale->device()
                               : found_inf ? found_inf->device()
                                           : c10::Device(at::kCPU);
    return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  const at::NoGradGuard no_grad;
  const c10::Device device = check_gradients(grads);
  if (grad_scale) check_scalar("grad_scale", *grad_scale, device, false);
  if (found_inf) check_scalar("found_inf", *found_inf, device, false);
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional<c10::Device>(device));

  Gradients ordered;
  ordered.reserve(grads.size());
  std::list<at::Tensor> copies;
  bool any_double = false;
  for (const at::Tensor* const grad : grads) {
    any_double |= grad->scalar_type() == at::kDouble;
    if (grad->_is_zerotensor()) continue;  // has no memory, and adds nothing
    ordered.push_back(in_memory_order(*grad) ? grad : &copies.emplace_back(grad->resolve_neg().contiguous()));
  }
  const SpanList list(ordered);
  const at::Tensor norm =
      at::empty({}, at::TensorOptions().dtype(any_double ? at::kDouble : at::kFloat).device(device));

  if (device.is_cpu()) {
    const double factor = grad_scale ? 1.0 / static_cast<double>(*grad_scale->const_data_ptr<float>()) : 1.0;
    std::vector<double> partials(static_cast<size_t>(list.chunk_count()));
    std::atomic<bool> any_nonfinite{false};
    list.for_each_chunk([&](int64_t c, const TensorSpan& span, int64_t start, int64_t n) {
      bool nonfinite = false;
      partials[static_cast<size_t>(c)] =
          cpu::sum_squares(element(span, start), static_cast<DType>(span.dtype), n, factor, nonfinite);
      if (nonfinite) any_nonfinite = true;
    });
    double sum = 0.0;
    for (const double partial : partials) sum += partial;
    if (found_inf && any_nonfinite) *found_inf->mutable_data_ptr<float>() = 1.0f;
    norm.fill_(std::sqrt(sum));
    return norm;
  }
#ifdef FUSEDOPS_WITH_CUDA
  const cudaStream_t stream = current_stream(device);
  const DeviceSpans tables = device_spans(list, device, stream);
  const at::Tensor partials = at::empty({list.chunk_count()}, at::TensorOptions().dtype(at::kDouble).device(device));
  cuda::GradNormArgs args;
  args.spans = static_cast<const TensorSpan*>(tables.spans.const_data_ptr());
  args.chunks = static_cast<const cuda::Chunk*>(tables.chunks.const_data_ptr());
  args.chunk_count = list.chunk_count();
  args.chunk_size = list.chunk_size;
  args.grad_scale = grad_scale ? grad_scale->const_data_ptr<float>() : nullptr;
  args.found_inf = found_inf ? found_inf->mutable_data_ptr<float>() : nullptr;
  args.partials = partials.mutable_data_ptr<double>();
  args.norm = norm.mutable_data_ptr();
  args.norm_dtype = dtype_of(norm);
  check_launch(cuda::grad_norm(args, stream));
#endif
  return norm;
}

void grad_scale_(const Gradients& grads, const at::Tensor& coef) {
  if (grads.empty()) return;
  const at::NoGradGuard no_grad;
  const c10::Device device = check_gradients(grads);
  check_scalar("coef", coef, device, true);
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional<c10::Device>(device));

  Gradients ordered;
  ordered.reserve(grads.size());
  for (const at::Tensor* const grad : grads) {
    if (grad->_is_zerotensor()) continue;
    if (in_memory_order(*grad)) {
      ordered.push_back(grad);
      if (!grad->is_inference()) grad->unsafeGetTensorImpl()->bump_version();
    } else {
      grad->mul_(coef.reshape({}));  // rare: memory with gaps
    }
  }
  const SpanList list(ordered);

  if (device.is_cpu()) {
    const double factor =
        coef.scalar_type() == at::kDouble ? *coef.const_data_ptr<double>() : *coef.const_data_ptr<float>();
    if (factor == 1.0) return;
    list.for_each_chunk([&](int64_t, const TensorSpan& span, int64_t start, int64_t n) {
      cpu::scale(element(span, start), static_cast<DType>(span.dtype), n, factor);
    });
    return;
  }
#ifdef FUSEDOPS_WITH_CUDA
  const cudaStream_t stream = current_stream(device);
  const DeviceSpans tables = device_spans(list, device, stream);
  check_launch(cuda::grad_scale({static_cast<const TensorSpan*>(tables.spans.const_data_ptr()),
                                 static_cast<const cuda::Chunk*>(tables.chunks.const_data_ptr()), list.chunk_count(),
                                 list.chunk_size, coef.const_data_ptr(), dtype_of(coef)},
                                stream));
#endif
}

}  // namespace fusedops
