// The streams of the simulated devices, and what queues work in them. See fakedev.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Stream.h>
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

// The same numbers as a CPU tensor. It holds the memory and no Python object, so that a stream may let go of it.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [held = tensor.storage()](void*) {},
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

}  // namespace
