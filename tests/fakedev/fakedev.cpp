// A simulated accelerator for tests: several devices that work by themselves, as GPUs do, in the host's memory. What it
// is faithful in, because the code under test depends on it:
//   - every device has streams; each is a thread of its own, and does its work in order, some time after it was asked.
//     Streams know nothing of one another unless an event ties them together. Events carry times;
//   - the current device and the current streams belong to the thread, as in CUDA;
//   - a `non_blocking` copy returns at once only where the host's side is pinned memory. Between two devices both their
//     current streams take part, and the host does not wait;
//   - products into a given output (`mm.out`) are asynchronous too. They and copies read when they begin and write when
//     they end: what is read too early is not right by chance;
//   - operands on different devices are refused; memory is counted for each device.
//
// Everything else is computed on the CPU at once, after the current streams of its operands' devices. Random numbers
// are the CPU's. Beside tensors on "fakedev:0" to "fakedev:3" there is:
//   torch.ops.fakedev.busy(ms, device)              keep the device's current stream busy for so long
//   torch.ops.fakedev.take(kernel_ms, copy_ms, link_ms)
//                                                   have every product, copy and exchange between processes last so long

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include "collectives.h"

namespace {

// ----------------------------------------------------------------------------------------------- devices and events

struct Event {
  Moment last;  // that of its newest record
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kFake;
  static DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_device; }
  static Stream stream(DeviceIndex device, StreamId id) { return Stream(Stream::UNSAFE, Device(kFake, device), id); }
  static Moment moment(void* event) { return event ? static_cast<Event*>(event)->last : Moment(); }

  c10::DeviceType type() const override { return kFake; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(kFake, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "fakedev: there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override {
    return stream(index(device), current_stream.at(size_t(index(device))));
  }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getNewStream(Device device, int) const override { return stream(index(device), ++newest_stream); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {  // for what follows a collective
    static const StreamId pooled = ++newest_stream;
    return stream(index(device), pooled);
  }
  Stream exchangeStream(Stream wanted) const override {
    auto before = getStream(wanted.device());
    current_stream.at(size_t(wanted.device_index())) = wanted.id();
    return before;
  }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).drain(); }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (auto& [id, queue] : used_queues(device)) queue->drain();
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = queue_of(stream).record();
  }
  void block(void* event, const Stream& stream) const override { queue_of(stream).wait_for(moment(event)); }
  bool queryEvent(void* event) const override { return !moment(event).valid() || is_past(moment(event)); }
  void synchronizeEvent(void* event) const override {
    if (auto last = moment(event); last.valid()) last.wait();
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto begun = moment(start), ended = moment(end);
    TORCH_CHECK(begun.valid() && ended.valid(), "fakedev: an event was never recorded");
    TORCH_CHECK(is_past(begun) && is_past(ended), "fakedev: an event is still to come");
    return Milliseconds(ended.get() - begun.get()).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ----------------------------------------------------------------------------------------------------------- memory

void* aligned(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(bytes == 0 || posix_memalign(&data, 64, bytes) == 0, "fakedev: out of the host's memory");
  return data;
}

struct DeviceMemory final : c10::DeviceAllocator {
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  struct Block {
    void* data;
    size_t bytes;
    DeviceIndex device;
  };
  static inline std::mutex mutex;
  static inline std::array<Stats, kDevices> stats;

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{aligned(bytes), bytes, current_device};
    std::lock_guard lock(mutex);
    stats.at(size_t(block->device)).allocated_bytes[0].increase(bytes);
    return {block->data, block, &release, Device(kFake, block->device)};
  }
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    std::lock_guard lock(mutex);
    stats.at(size_t(block->device)).allocated_bytes[0].decrease(block->bytes);
    std::free(block->data);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr&, Stream) override {}  // queued work holds on to its memory by itself
  void emptyCache(c10::MempoolId_t) override {}
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
  Stats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return stats.at(size_t(device));
  }
};

// Pinned memory of the host: ordinary memory of which is known where it lies.
struct PinnedMemory final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::map<const void*, size_t> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    auto* data = aligned(std::max<size_t>(bytes, 1));
    std::lock_guard lock(mutex);
    blocks[data] = bytes;
    return {data, data, &release, c10::kCPU};
  }
  static void release(void* data) {
    std::lock_guard lock(mutex);
    blocks.erase(data);
    std::free(data);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  static bool holds(const void* data) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound(data);
    if (after == blocks.begin()) return false;
    auto& [start, bytes] = *std::prev(after);
    return data < static_cast<const char*>(start) + bytes;
  }
};

auto& device_memory = *new DeviceMemory;  // never deleted: tensors may outlive everything here
auto& pinned_memory = *new PinnedMemory;
REGISTER_ALLOCATOR(kFake, &device_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto device = storage.device().index();
    c10::OptionalDeviceGuard guard(storage.device());
    auto grown = device_memory.allocate(bytes);
    std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    auto old = std::make_shared<c10::DataPtr>(storage.set_data_ptr(std::move(grown)));
    storage.set_nbytes(bytes);
    // As an allocator that knows streams: free once the current one has got so far.
    queue_of(device, current_stream.at(size_t(device))).submit([old] {});
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ------------------------------------------------------------------------------------------------------- operations

at::Tensor empty(at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
                 optional<bool>, optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype,
                         optional<at::Layout>, optional<Device> device, optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto task = [from = on_host(source), to = on_host(target)] {
    auto read = from.clone();
    pass_time(copy_ms);
    to.copy_(read);
  };
  if (source.is_cpu() || target.is_cpu()) {
    auto& host = source.is_cpu() ? source : target;
    auto& queue = current_queue(source.is_cpu() ? target : source);
    queue.submit(std::move(task));
    if (!non_blocking || !PinnedMemory::holds(host.const_data_ptr())) queue.drain();
    return target;
  }
  // By the source's stream. The target's must have got so far, and goes on afterwards; it may be the same one.
  auto &sends = current_queue(source), &receives = current_queue(target);
  sends.wait_for(receives.record());
  sends.submit(std::move(task));
  receives.wait_for(sends.record());
  return target;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& product(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  TORCH_CHECK(a.device() == b.device() && a.device() == out.device(), "fakedev: mm of operands on different devices");
  current_queue(a).submit([a = on_host(a), b = on_host(b), out = on_host(out)] {
    auto made = at::mm(a, b);
    pass_time(kernel_ms);
    out.copy_(made);
  });
  return out;
}

at::Scalar item(const at::Tensor& tensor) {
  current_queue(tensor).drain();
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& stack) {
  std::vector<at::Tensor> found;
  for (const auto& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) found.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor);
  }
  return found;
}

// Everything else: on the CPU, by whatever kernel that has, once the operands are there.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  optional<Device> device;
  for (const auto& tensor : tensors_of(*stack)) {
    if (!tensor.is_cpu()) current_queue(tensor).drain();
    // A single number may come from anywhere, and the places that are looked up from the host.
    if (tensor.dim() == 0 || (tensor.is_cpu() && name.find("index") != name.npos)) continue;
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(), "fakedev: ", name, " of operands on ", *device, " and ", tensor.device());
  }
  c10::OptionalDeviceGuard guard(device && !device->is_cpu() ? device : std::nullopt);
  at::native::cpu_fallback(op, stack);
}

// Its schema conceals that it writes the running statistics, and so nothing would bring them back from the CPU.
using MaybeTensor = const optional<at::Tensor>&;
auto batch_norm(const at::Tensor& x, MaybeTensor weight, MaybeTensor bias, MaybeTensor mean, MaybeTensor variance,
                bool training, double momentum, double eps) {
  at::Tensor means = mean.value_or(at::Tensor()), variances = variance.value_or(at::Tensor());
  return means.defined() ? at::_native_batch_norm_legit(x, weight, bias, means, variances, training, momentum, eps)
                         : at::_native_batch_norm_legit(x, weight, bias, training, momentum, eps);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("mm.out", product);
  m.impl("native_batch_norm", batch_norm);
  m.impl("_local_scalar_dense", item);
  // What only looks at memory another way is the same everywhere.
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

TORCH_LIBRARY(fakedev, m) {
  m.def("busy(float ms, int device) -> ()", [](double ms, int64_t device) {
    queue_of(DeviceIndex(device), current_stream.at(size_t(device))).submit([ms] { pass_time(ms); });
  });
  m.def("take(float kernel_ms, float copy_ms, float link_ms=0) -> ()",
        [](double kernel, double copy, double link) { kernel_ms = kernel, copy_ms = copy, link_ms = link; });
  m.def("talk_over(__torch__.torch.classes.c10d.ProcessGroup group) -> ()", talk_over);
}

}  // namespace
