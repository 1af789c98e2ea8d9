// How simulated devices of several processes talk with one another, as NCCL has GPUs do: every group works in streams of
// its own, which begin once the caller's current stream has got so far. Nobody's host waits: `Work::wait` has the current
// stream wait. Gloo carries the bytes between the hosts. What is sent is read late, and what is received is written late
// (half of `link_ms` before, half after): who changes the one or reads the other too early does not get it right by chance.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "streams.h"

namespace {

std::atomic<double> link_ms{0};

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

class StreamWork final : public Work {
 public:
  StreamWork(int rank, c10d::OpType op, const Stream& stream, Tensors outputs)
      : Work(rank, op), stream_(stream), done_(queue_of(stream).record()), outputs_(std::move(outputs)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<Device>{stream.device()});
    c10::StreamGuard guard(stream);  // whoever waits for the future, waits for this stream
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return is_past(done_); }
  bool isSuccess() const override { return true; }  // a failure is told by the stream, to whoever synchronises next
  void synchronize() override {
    queue_of(stream_.device_index(), current_stream.at(size_t(stream_.device_index()))).wait_for(done_);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Stream stream_;
  Moment done_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> link)
      : Backend(link->getRank(), link->getSize()), link_(std::move(link)) {}
  const std::string getBackendName() const override { return "fakeccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(c10d::OpType::BROADCAST, tensors, tensors,
               [=, this](Tensors& sent, Tensors&) { return link_->broadcast(sent, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(c10d::OpType::ALLREDUCE, tensors, tensors,
               [=, this](Tensors& sent, Tensors&) { return link_->allreduce(sent, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(c10d::OpType::REDUCE, tensors, tensors,
               [=, this](Tensors& sent, Tensors&) { return link_->reduce(sent, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& gathered, Tensors& tensors, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::ALLGATHER, tensors, gathered.at(0), [=, this](Tensors& sent, Tensors& received) {
      std::vector<Tensors> lists{received};
      return link_->allgather(lists, sent, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& whole, at::Tensor& part, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {part}, {whole}, [=, this](Tensors& sent, Tensors& received) {
      return link_->_allgather_base(received[0], sent[0], options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& wholes, Tensors& parts,
                                          const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::COALESCED, parts, wholes, [=, this](Tensors& sent, Tensors& received) {
      return link_->allgather_into_tensor_coalesced(received, sent, options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& part, at::Tensor& whole, const c10d::ReduceScatterOptions& options) override {
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, {whole}, {part}, [=, this](Tensors& sent, Tensors& received) {
      return link_->_reduce_scatter_base(received[0], sent[0], options);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return run(c10d::OpType::SEND, tensors, {}, [=, this](Tensors& sent, Tensors&) { return link_->send(sent, to, tag); },
               to);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run(c10d::OpType::RECV, {}, tensors,
               [=, this](Tensors&, Tensors& received) { return link_->recv(received, from, tag); }, from);
  }

 private:
  static constexpr int kAll = -1;

  static Tensors on_hosts(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(on_host(tensor));
    return found;
  }

  // `exchange` what the tensors `from` hold; what came of it is in `into`, which may be the same ones.
  template <typename Exchange>
  WorkPtr run(c10d::OpType op, const Tensors& from, const Tensors& into, Exchange exchange, int with = kAll) {
    auto device = (into.empty() ? from : into).at(0).device();
    auto stream = stream_with(with, device);
    auto& queue = queue_of(stream);
    queue.wait_for(queue_of(device.index(), current_stream.at(size_t(device.index()))).record());
    bool in_place = !from.empty() && !into.empty() && from[0].is_same(into[0]);
    queue.submit([=, from = on_hosts(from), into = on_hosts(into)] {
      pass_time(link_ms / 2);
      Tensors sent, received;
      for (const auto& tensor : from) sent.push_back(tensor.contiguous().clone());
      for (const auto& tensor : into) received.push_back(at::empty(tensor.sizes(), tensor.options()));
      exchange(sent, received)->wait();
      pass_time(link_ms / 2);
      for (size_t i = 0; i < into.size(); ++i) into[i].copy_(in_place ? sent[i] : received[i]);
    });
    return c10::make_intrusive<StreamWork>(getRank(), op, stream, into);
  }

  // Two that exchange something do so beside the group, in a stream for the pair of them.
  Stream stream_with(int rank, const Device& device) {
    std::lock_guard lock(mutex_);
    auto [found, is_new] = streams_.try_emplace(rank, 0);
    if (is_new) found->second = ++newest_stream;
    return Stream(Stream::UNSAFE, device, found->second);
  }

  c10::intrusive_ptr<c10d::Backend> link_;
  std::mutex mutex_;
  std::map<int, StreamId> streams_;
};

// Have the simulated devices of this group talk over the backend that it has for the host's tensors.
void talk_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto backend = c10::make_intrusive<Collectives>(group->getBackend(c10::kCPU));
  group->setBackend(kFake, c10d::ProcessGroup::BackendType::CUSTOM, backend);
}

}  // namespace
