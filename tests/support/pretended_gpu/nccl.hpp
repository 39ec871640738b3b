// A process group with NCCL's order, over gloo: its operations run one after the other, each on its communicator's
// stream, begun when the current stream reaches where they were posted.
//
// A communicator is made by its first operation, per device and, unless the group is bound to its device, per pair of
// ranks that send; two ranks on one GPU are refused then. `wait` makes the current stream wait, not the host: what is
// posted next waits for it too, and so do kernels, which here are the host's. This shows the deadlocks of streams. While
// the current stream is captured an operation is noted, and so is a `wait` for it; each replay posts it anew.
#pragma once
#include "operators.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>

using c10d::Work;
using Works = c10::intrusive_ptr<Work>;
using Start = std::function<Works()>;
using Tensors = std::vector<Tensor>;
constexpr int GREETING = (1 << 30) + 1;  // the tag of a communicator's first messages

struct Job {
  Pending needs;  // of the stream that it was posted from
  std::vector<Start> starts;
  std::vector<std::function<void()>> after;
  std::shared_ptr<Done> done = std::make_shared<Done>();
};

struct Communicator {  // a queue with a thread: what NCCL does on one stream
  DeviceIndex device;
  int64_t stream;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  std::shared_ptr<Job> running;
  bool aborted = false;

  Communicator(DeviceIndex index) : device(index) {
    Lock lock(state().mutex);
    stream = state().next_stream++;
  }
  StreamKey key() const { return key_of(device, stream); }
  void give(std::shared_ptr<Job> job) {
    std::lock_guard<std::mutex> lock(mutex);
    if (aborted) job->done->finish(ended(), true);
    else jobs.push_back(std::move(job));
    changed.notify_all();
  }
  static std::exception_ptr ended() {
    return std::make_exception_ptr(std::runtime_error("NCCL communicator was aborted"));
  }
  void abort() {
    std::lock_guard<std::mutex> lock(mutex);
    aborted = true;
    if (running) running->done->finish(ended(), true);
    for (auto& job : jobs) job->done->finish(ended(), true);
    jobs.clear();
    changed.notify_all();
    Lock state_lock(state().mutex);
    join(state().host, state().clocks[key()]);  // its kernels are over
  }
  static void live(std::shared_ptr<Communicator> self) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(self->mutex);
        self->running = nullptr;
        self->changed.wait(lock, [&] { return self->aborted || !self->jobs.empty(); });
        if (self->aborted) return;
        self->running = self->jobs.front();
        self->jobs.pop_front();
      }
      if (self->run(*self->running)) continue;
      std::unique_lock<std::mutex> lock(self->mutex);
      self->changed.wait(lock, [&] { return self->aborted; });
      return;
    }
  }
  // Whether it came to an end: a kernel whose peer is gone spins on.
  static bool run(Job& job) {
    try {
      for (auto& need : job.needs) need->wait();
      std::vector<Works> works;
      for (auto& start : job.starts) works.push_back(start());
      for (auto& work : works)
        if (work) work->wait();
      for (auto& each : job.after) each();
      job.done->finish(nullptr);
    } catch (const c10::Error&) {
      job.done->finish(std::current_exception());
    } catch (...) {  // gloo's: the connection is closed
      return false;
    }
    job.starts.clear();
    job.after.clear();
    return true;
  }
};

struct Posted {  // an operation, or several that are one; of a graph it is another job in each replay
  std::shared_ptr<Job> job;
  Moment end;         // of the communicator's stream
  Clock end_in_capture;
  bool captured = false;
};

struct NcclWork final : Work {
  std::shared_ptr<Posted> posted;
  Tensors held;
  DeviceIndex device;
  bool for_host;  // a barrier
  NcclWork(std::shared_ptr<Posted> p, Tensors t, DeviceIndex i, bool h)
      : posted(std::move(p)), held(std::move(t)), device(i), for_host(h) {}
  Done& done() const {
    TORCH_CHECK(posted->job, "CUDA error: operation not permitted on work of a capture");
    return *posted->job->done;
  }
  bool isCompleted() override {
    refuse_in_capture("work.is_completed");
    return done().is_over();
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(done().mutex);
    return done().over && !done().error;
  }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(done().mutex);
    return done().error;
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (!posted->captured) {
      if (timeout != kNoTimeout) done().patience = timeout;
      if (for_host || done().is_over()) done().wait();
    }
    synchronize();
    return true;
  }
  void synchronize() override {
    {
      Lock lock(state().mutex);
      auto stream = key_of(device, streams[device]);
      TORCH_CHECK(captures(stream) == posted->captured, "CUDA error: dependency created on ",
                  posted->captured ? "captured" : "uncaptured", " work in another stream");
      if (posted->captured) {
        join(state().captured[stream], posted->end_in_capture);
        state().capture->note(stream, [from = posted] { follow(stream_now(), from->end); });
      } else {
        follow(stream, posted->end);
        if (for_host) join(state().host, posted->end.clock);
      }
    }
    held.clear();  // without the mutex: to free a tensor can take Python's lock
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    auto results = held;
    settle(posted->end.pending);
    made->markCompleted(IValue(results));
    return made;
  }
};

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  c10::intrusive_ptr<c10d::Backend::Options> options_;
  std::map<std::pair<DeviceIndex, std::string>, std::shared_ptr<Communicator>> communicators;
  std::mutex mutex;
  uint64_t host_name;
  bool bound = false, coalescing = false, ended = false;
  std::shared_ptr<Posted> batch;
  Tensors batch_held;
  std::shared_ptr<Communicator> batch_on;

  Nccl(c10::intrusive_ptr<c10d::Backend> group, int rank, int size, uint64_t host, std::chrono::milliseconds timeout)
      : Backend(rank, size), inner(std::move(group)), host_name(host) {
    options_ = c10::make_intrusive<c10d::Backend::Options>("nccl", timeout);
  }
  ~Nccl() override { abort(); }
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(Device device) override {
    bound = true;
    on(device.index(), "all", -1);
  }
  bool supportsCoalescing() const override { return true; }

  // The communicator of a device: `peer` is the other rank of a pair, -1 for all.
  std::shared_ptr<Communicator> on(DeviceIndex device, std::string name, int peer) {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(!ended, "NCCL communicator was aborted");
    auto& found = communicators[{device, name}];
    if (found) return found;
    refuse_in_capture("a new communicator of NCCL");
    found = std::make_shared<Communicator>(device);
    {
      Lock state_lock(state().mutex);
      state().contexts.insert(device);
      state().communicators++;
    }
    auto greeting = std::make_shared<Job>();
    greeting->starts.push_back([group = inner, host = host_name, device, peer] { return greet(*group, host, device, peer); });
    found->give(greeting);
    std::thread(&Communicator::live, found).detach();
    return found;
  }
  static Works greet(c10d::Backend& group, uint64_t host, DeviceIndex device, int peer) {
    int rank = group.getRank();
    Tensor own = at::empty({2}, at::kLong);
    own.data_ptr<int64_t>()[0] = static_cast<int64_t>(host);
    own.data_ptr<int64_t>()[1] = device;
    for (int other = 0; other < group.getSize(); ++other) {
      if (other == rank || (peer >= 0 && other != peer)) continue;
      Tensor its = at::empty_like(own);
      Tensors sent{own}, received{its};
      auto send = group.send(sent, other, GREETING + rank), receive = group.recv(received, other, GREETING + other);
      receive->wait();
      send->wait();
      TORCH_CHECK(!at::equal(own, its), "NCCL error: invalid usage. Duplicate GPU detected: rank ", rank,
                  " and rank ", other, " both on CUDA device ", static_cast<int>(device));
    }
    return {};
  }
  std::shared_ptr<Communicator> pair(DeviceIndex device, int peer) {
    if (bound || getSize() == 2) {
      // of two ranks: a group bound to its device has one for everything, any other one for what is sent
      return on(device, bound ? "all" : "pair", bound ? -1 : peer);
    }
    auto [low, high] = std::minmax(getRank(), peer);
    return on(device, std::to_string(low) + ":" + std::to_string(high), peer);
  }

  Works begin(const char* name, Views& views, Tensors held, Start start, int peer = -1,
              std::function<void()> after = nullptr) {
    TORCH_CHECK(!held.empty());
    for (auto& each : held) {
      TORCH_CHECK(each.is_cuda(), "No backend type associated with device type cpu (nccl)");
      TORCH_CHECK(each.device() == held[0].device(), "NCCL: tensors of one operation on several devices");
    }
    auto device = held[0].device().index();
    auto communicator = peer < 0 ? on(device, "all", -1) : pair(device, peer);
    auto posted = coalescing ? batch : std::make_shared<Posted>();
    if (!coalescing) open(posted, device);
    now_or_noted(device, [=, op = std::string("nccl::") + name, reads = views.reads, writes = views.writes] {
      auto stream = key_of(device, streams[device]);
      {
        Lock lock(state().mutex);
        join(state().clocks[communicator->key()], state().clocks[stream]);
      }
      launch(communicator->key(), op, reads, writes);
      posted->job->needs = pending_on(stream);
      posted->job->starts.push_back(start);
      if (after) posted->job->after.push_back(after);
    });
    if (!coalescing) return close(posted, communicator, std::move(held));
    batch_on = communicator;
    batch_held.insert(batch_held.end(), held.begin(), held.end());
    return c10::make_intrusive<NcclWork>(posted, std::move(held), device, false);
  }
  static void now_or_noted(DeviceIndex device, std::function<void()> act) {
    auto stream = key_of(device, streams[device]);
    captures(stream) ? state().capture->note(stream, std::move(act)) : act();
  }
  void open(const std::shared_ptr<Posted>& posted, DeviceIndex device) {
    posted->captured = captures(key_of(device, streams[device]));
    now_or_noted(device, [posted, patience = options_->timeout] {
      posted->job = std::make_shared<Job>();
      posted->job->done->patience = patience;
    });
  }
  Works close(const std::shared_ptr<Posted>& posted, const std::shared_ptr<Communicator>& on, Tensors held) {
    auto device = on->device;
    now_or_noted(device, [posted, on] {
      on->give(posted->job);
      Lock lock(state().mutex);
      posted->end = {state().clocks[on->key()], {posted->job->done}};
    });
    if (posted->captured) {  // its stream takes part in the capture
      Lock lock(state().mutex);
      auto& clock = state().captured[on->key()];
      join(clock, state().captured[key_of(device, streams[device])]);
      ++clock[on->key()];
      posted->end_in_capture = clock;
    }
    return c10::make_intrusive<NcclWork>(posted, std::move(held), device, false);
  }
  void startCoalescing() override {
    coalescing = true;
    batch = std::make_shared<Posted>();
    open(batch, current);
  }
  Works endCoalescing() override {
    coalescing = false;
    if (!batch_on) return {};
    auto made = close(batch, batch_on, std::move(batch_held));
    batch_held.clear();
    batch_on = nullptr;
    return made;
  }

  Tensors host(Views& views, const Tensors& tensors, bool written) {
    Tensors out;
    for (auto& each : tensors) {
      TORCH_CHECK(each.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      out.push_back(views.host(each, written));
    }
    return out;
  }
  // gloo has no average
  template <class Options>
  std::function<void()> averaged(Options& options, Tensors results) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return nullptr;
    options.reduceOp = c10d::ReduceOp::SUM;
    return [results, size = getSize()] {
      at::AutoDispatchBelowAutograd guard;
      for (auto each : results) each.div_(size);
    };
  }
  Works broadcast(Tensors& given, const c10d::BroadcastOptions& o) override {
    Views v;
    auto h = host(v, given, o.rootRank != getRank());
    return begin("broadcast", v, given, [=, group = inner]() mutable { return group->broadcast(h, o); });
  }
  Works allreduce(Tensors& given, const c10d::AllreduceOptions& options) override {
    Views v;
    auto o = options;
    auto h = host(v, given, true);
    auto after = averaged(o, h);
    return begin("allreduce", v, given, [=, group = inner]() mutable { return group->allreduce(h, o); }, -1, after);
  }
  Works allreduce_coalesced(Tensors& given, const c10d::AllreduceCoalescedOptions& options) override {
    Views v;
    c10d::AllreduceOptions o = options;
    auto h = host(v, given, true);
    auto after = averaged(o, h);
    auto start = [=, group = inner]() mutable {
      for (auto& each : h) {
        Tensors one{each};
        group->allreduce(one, o)->wait();
      }
      return Works();
    };
    return begin("allreduce_coalesced", v, given, start, -1, after);
  }
  Works reduce(Tensors& given, const c10d::ReduceOptions& o) override {
    Views v;
    auto h = host(v, given, true);
    return begin("reduce", v, given, [=, group = inner]() mutable { return group->reduce(h, o); });
  }
  Works allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    Views v;
    auto i = host(v, in, false);
    std::vector<Tensors> h;
    Tensors held(in);
    for (auto& each : out) {
      h.push_back(host(v, each, true));
      held.insert(held.end(), each.begin(), each.end());
    }
    return begin("allgather", v, held, [=, group = inner]() mutable { return group->allgather(h, i, o); });
  }
  Works gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    Views v;
    auto i = host(v, in, false);
    std::vector<Tensors> h;
    Tensors held(in);
    for (auto& each : out) {
      h.push_back(host(v, each, true));
      held.insert(held.end(), each.begin(), each.end());
    }
    return begin("gather", v, held, [=, group = inner]() mutable { return group->gather(h, i, o); });
  }
  Works scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    Views v;
    auto h = host(v, out, true);
    std::vector<Tensors> i;
    Tensors held(out);
    for (auto& each : in) {
      i.push_back(host(v, each, false));
      held.insert(held.end(), each.begin(), each.end());
    }
    return begin("scatter", v, held, [=, group = inner]() mutable { return group->scatter(h, i, o); });
  }
  Works _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    Views v;
    auto i = v.host(in, false), h = v.host(out, true);
    return begin("_allgather_base", v, {out, in}, [=, group = inner]() mutable { return group->_allgather_base(h, i, o); });
  }
  Works allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    Views v;
    auto i = host(v, in, false), h = host(v, out, true);
    Tensors held(out);
    held.insert(held.end(), in.begin(), in.end());
    auto start = [=, group = inner]() mutable {
      for (size_t k = 0; k < h.size(); ++k) group->_allgather_base(h[k], i[k], o)->wait();
      return Works();
    };
    return begin("allgather_into_tensor_coalesced", v, held, start);
  }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Views v;
    auto o = options;
    auto i = v.host(in, false), h = v.host(out, true);
    auto after = averaged(o, {h});
    auto start = [=, group = inner]() mutable { return group->_reduce_scatter_base(h, i, o); };
    return begin("_reduce_scatter_base", v, {out, in}, start, -1, after);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    Views v;
    auto o = options;
    auto i = host(v, in, false), h = host(v, out, true);
    auto after = averaged(o, h);
    Tensors held(out);
    held.insert(held.end(), in.begin(), in.end());
    auto start = [=, group = inner]() mutable {
      for (size_t k = 0; k < h.size(); ++k) group->_reduce_scatter_base(h[k], i[k], o)->wait();
      return Works();
    };
    return begin("reduce_scatter_tensor_coalesced", v, held, start, -1, after);
  }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                      const c10d::AllToAllOptions& o) override {
    Views v;
    auto i = v.host(in, false), h = v.host(out, true);
    return begin("alltoall", v, {out, in}, [=, group = inner]() mutable { return group->alltoall_base(h, i, to, from, o); });
  }
  Works send(Tensors& given, int to, int tag) override {
    Views v;
    auto h = host(v, given, false);
    return begin("send", v, given, [=, group = inner]() mutable { return group->send(h, to, 0); }, to);
  }
  Works recv(Tensors& given, int from, int tag) override {
    Views v;
    auto h = host(v, given, true);
    return begin("recv", v, given, [=, group = inner]() mutable { return group->recv(h, from, 0); }, from);
  }
  Works barrier(const c10d::BarrierOptions& options) override {
    auto device = options.device_ids.empty() ? current : static_cast<DeviceIndex>(options.device_ids[0]);
    refuse_in_capture("barrier");
    auto communicator = on(device, "all", -1);
    auto posted = std::make_shared<Posted>();
    open(posted, device);
    posted->job->needs = pending_on(key_of(device, streams[device]));
    posted->job->starts.push_back([group = inner] { return group->barrier(c10d::BarrierOptions()); });
    {
      Lock lock(state().mutex);
      join(state().clocks[communicator->key()], state().clocks[key_of(device, streams[device])]);
    }
    close(posted, communicator, {});
    return c10::make_intrusive<NcclWork>(posted, Tensors(), device, true);
  }
  void abort() override {
    std::lock_guard<std::mutex> lock(mutex);
    ended = true;
    for (auto& [key, communicator] : communicators) communicator->abort();
    {
      Lock state_lock(state().mutex);
      state().communicators -= static_cast<int>(communicators.size());
    }
    communicators.clear();
  }
  void shutdown() override {
    abort();
    inner->shutdown();
  }
};
