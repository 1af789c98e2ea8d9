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
//   torch.ops.fakedev.take(kernel_ms, copy_ms)      have every product and every copy last so long from now on

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <condition_variable>
#include <future>
#include <map>
#include <queue>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using std::optional;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};
constexpr int kDevices = 4;

std::atomic<double> kernel_ms{0}, copy_ms{0};

// Asleep, so that four busy devices need no four cores.
void pass_time(double ms) { std::this_thread::sleep_for(Milliseconds(ms)); }

// ---------------------------------------------------------------------------------------------- streams and events

// A point in a stream, reached once all work that was queued before it is done: when that was. Not valid: nowhere.
using Moment = std::shared_future<Clock::time_point>;

bool is_past(const Moment& moment) { return moment.wait_for(Milliseconds(0)) == std::future_status::ready; }

// The work of one stream, done in order by a thread of its own.
class Queue {
 public:
  Queue() { std::thread([this] { work(); }).detach(); }
  void submit(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push(std::move(task));
    more_.notify_one();
  }
  Moment record() {
    auto reached = std::make_shared<std::promise<Clock::time_point>>();
    submit([reached] { reached->set_value(Clock::now()); });
    return reached->get_future().share();
  }
  void wait_for(const Moment& moment) {  // the stream waits, not the caller
    if (moment.valid()) submit([moment] { moment.wait(); });
  }
  void drain() {
    record().wait();
    std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        more_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop();
      }
      try {
        task();
      } catch (...) {  // told to whoever synchronises next, as CUDA does
        std::lock_guard lock(mutex_);
        failure_ = std::current_exception();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::queue<std::function<void()>> tasks_;
  std::exception_ptr failure_;
};

// The streams of all devices by number, 0 the default one. Threads begin with their first use: loading this starts
// none, so that a process may still fork afterwards. Nothing is ever deleted: they work until the process ends.
std::mutex streams_mutex;
auto& streams = *new std::array<std::map<StreamId, Queue*>, kDevices>;
std::atomic<StreamId> newest_stream{0};

thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, kDevices> current_stream{};

Queue& queue_of(DeviceIndex device, StreamId id) {
  std::lock_guard lock(streams_mutex);
  auto& queue = streams.at(size_t(device))[id];
  if (!queue) queue = new Queue;
  return *queue;
}
Queue& queue_of(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
Queue& current_queue(const at::Tensor& tensor) {
  return queue_of(tensor.get_device(), current_stream.at(size_t(tensor.get_device())));
}

std::map<StreamId, Queue*> used_queues(DeviceIndex device) {
  std::lock_guard lock(streams_mutex);
  return streams.at(size_t(device));
}

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
  Stream getNewStream(Device device, int) const override { return stream(index(device), ++newest_stream); }
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
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ------------------------------------------------------------------------------------------------------- operations

// The same numbers as a CPU tensor. It holds the memory and no Python object, so that a stream may let go of it.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [held = tensor.storage()](void*) {},
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

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

at::Tensor copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
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
  return copy(source, target, false);
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
  m.impl("_copy_from", copy);
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
  m.def("take(float kernel_ms, float copy_ms) -> ()",
        [](double kernel, double copy) { kernel_ms = kernel, copy_ms = copy; });
}

}  // namespace
