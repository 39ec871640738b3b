// What CUDA guarantees of the order of work, as vector clocks; and what went against it.
//
// Every stream has a clock, and so has the host. A launch checks that what it reads or writes is ordered before it by an
// event, a wait or a host that waited. Found: RACE, two streams without an event between them; REUSE, memory that was
// freed and handed out again while a stream that `record_stream` never named may still use it; SYNC, the host waits.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using Lock = std::lock_guard<std::recursive_mutex>;
using StreamKey = int64_t;  // a device and a stream of it
using Clock = std::map<StreamKey, uint64_t>;
constexpr auto CUDA = DeviceType::CUDA;
constexpr int MOST_DEVICES = 16;

inline void join(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}
inline bool has_seen(const Clock& clock, StreamKey stream, uint64_t time) {
  auto at = clock.find(stream);
  return at != clock.end() && at->second >= time;
}

struct Use {
  uint64_t time = 0;
  std::string op;
  bool freed = false;
};
struct Span {  // the bytes of a block that a tensor covers
  void* memory;
  size_t begin = 0, end = SIZE_MAX;
  Span(void* block, size_t from = 0, size_t to = SIZE_MAX) : memory(block), begin(from), end(to) {}
  operator void*() const { return memory; }
};
using Place = std::tuple<StreamKey, size_t, size_t>;  // a stream, and the bytes that it used
struct Block {  // of memory: which streams used it last, and which ones `record_stream` named
  StreamKey owner = 0;
  size_t bytes = 0;
  std::map<Place, Use> reads, writes;
  std::set<StreamKey> recorded;
};
struct Memory {
  size_t now = 0, peak = 0, allocations = 0;
};

struct Done {  // of one message or collective, which may still be under way
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false, aborted = false;
  std::exception_ptr error;
  std::chrono::milliseconds patience{300'000};

  void finish(std::exception_ptr found, bool ended_early = false) {
    std::lock_guard<std::mutex> lock(mutex);
    if (over) return;
    over = true;
    aborted = ended_early;
    error = std::move(found);
    changed.notify_all();
  }
  bool is_over() {
    std::lock_guard<std::mutex> lock(mutex);
    return over;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    bool came = changed.wait_for(lock, patience, [&] { return over; });
    TORCH_CHECK(came, "NCCL operation timed out after ", patience.count(), " ms");
    if (error) std::rethrow_exception(error);
  }
};
using Pending = std::vector<std::shared_ptr<Done>>;

struct Graph;
struct State {
  std::recursive_mutex mutex;
  std::unordered_map<StreamKey, Clock> clocks;
  Clock host;
  std::unordered_map<StreamKey, Pending> awaited;  // what a stream stands still for
  std::unordered_map<void*, Block> memory;
  std::unordered_set<void*> pinned;
  std::map<StreamKey, std::map<StreamKey, Use>> pending;  // by owner, by stream: uses of memory that was freed
  std::set<int> contexts;                                 // devices that this process has talked to
  int communicators = 0;                                  // of NCCL, that are open
  int64_t next_stream = 1;
  Memory of_device[MOST_DEVICES];
  size_t launches = 0, waits = 0;
  std::map<std::string, size_t> faults, syncs;
  std::map<std::string, std::set<StreamKey>> ops;
  PyObject* stack_function = nullptr;
  Graph* capture = nullptr;
  std::thread::id capturing;
  std::map<StreamKey, Clock> captured;  // streams that take part in the capture, and what each follows of it
  int devices = 0, sync_mode = 0, fault_file = -1;
  bool writes_faults = true;
};
inline State& state() {
  static State* made = new State;
  return *made;
}
inline thread_local DeviceIndex current = 0;
inline thread_local std::unordered_map<DeviceIndex, int64_t> streams;  // the current one of every device

inline StreamKey key_of(DeviceIndex device, int64_t stream) { return (static_cast<int64_t>(device) << 40) + stream; }
inline StreamKey key_of(const c10::Stream& stream) { return key_of(stream.device_index(), stream.id()); }
inline std::string name_of(StreamKey key) {
  return "stream " + std::to_string(key & ((1LL << 40) - 1)) + " of cuda:" + std::to_string(key >> 40);
}
inline StreamKey stream_now() {
  Lock lock(state().mutex);
  state().contexts.insert(current);
  return key_of(current, streams[current]);
}

// What a stream stands still for.
inline Pending pending_on(StreamKey stream) {
  Lock lock(state().mutex);
  auto& all = state().awaited[stream];
  all.erase(std::remove_if(all.begin(), all.end(), [](auto& each) { return each->is_over() && !each->error; }), all.end());
  return all;
}
inline void stand_still(StreamKey stream, const Pending& more) {
  Lock lock(state().mutex);
  auto& all = state().awaited[stream];
  for (auto& each : more)
    if (std::find(all.begin(), all.end(), each) == all.end()) all.push_back(each);
}
// Kernels are the host's: it waits for what the stream waits for when it has one to run, or looks at a result. Behind
// what was aborted a stream goes on, with whatever is there; the work tells of it.
inline void settle(const Pending& pending) {
  if (pending.empty()) return;
  PyThreadState* python = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  std::exception_ptr error;
  try {
    for (auto& each : pending) {
      try {
        each->wait();
      } catch (...) {
        if (!each->aborted) throw;
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (python) PyEval_RestoreThread(python);
  if (error) std::rethrow_exception(error);
}
inline void settle(StreamKey stream) {
  auto pending = pending_on(stream);
  if (pending.empty()) return;
  {
    Lock lock(state().mutex);
    state().awaited.erase(stream);  // an error is raised once
  }
  settle(pending);
}

struct OnDevice {  // as c10::DeviceGuard
  DeviceIndex before = current;
  explicit OnDevice(DeviceIndex index) { current = index < 0 ? current : index; }
  ~OnDevice() { current = before; }
};

// Python's stack; called without the mutex, as another thread may hold Python's lock and wait for it.
inline std::string stack_now() {
  if (!state().stack_function || !Py_IsInitialized()) return "";
  auto gil = PyGILState_Ensure();
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* result = PyObject_CallNoArgs(state().stack_function);
  std::string out = result && PyUnicode_Check(result) ? PyUnicode_AsUTF8(result) : "";
  Py_XDECREF(result);
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
  PyGILState_Release(gil);
  return out;
}

// Faults also go to a file, at once: a process that is killed has then said them.
inline void note_fault(const std::string& what) {
  std::string text = what + " @ " + stack_now();
  Lock lock(state().mutex);
  std::string line = text + "\n";
  if (!state().faults[text]++ && state().writes_faults && state().fault_file >= 0) (void)!write(state().fault_file, line.data(), line.size());
}
inline void note_sync(const std::string& what) {
  std::string text = what + " @ " + stack_now();
  Lock lock(state().mutex);
  state().waits++;
  state().syncs[text]++;
}

inline bool captures_here() { return state().capture && state().capturing == std::this_thread::get_id(); }
inline bool captures(StreamKey stream) { return captures_here() && state().captured.count(stream); }
inline bool capturing() { return captures(key_of(current, streams[current])); }
inline void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(!captures_here(), "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

// The host waits for a stream. `said`: whether set_sync_debug_mode tells of it, as of all but explicit calls.
inline void host_waits(const std::string& what, StreamKey stream, bool said = true) {
  refuse_in_capture(what);
  TORCH_CHECK(!(said && state().sync_mode == 2), "called a synchronizing CUDA operation (", what, ")");
  settle(stream);
  {
    Lock lock(state().mutex);
    join(state().host, state().clocks[stream]);
  }
  note_sync(what);
}

inline void note_allocation(void* memory, size_t bytes) {
  auto& s = state();
  Lock lock(s.mutex);
  Block block;
  block.owner = stream_now();
  block.bytes = bytes;
  Clock& clock = s.clocks[block.owner];
  auto& pending = s.pending[block.owner];
  for (auto at = pending.begin(); at != pending.end();) {
    bool over = has_seen(clock, at->first, at->second.time) || has_seen(s.host, at->first, at->second.time);
    at = over ? pending.erase(at) : std::next(at);
  }
  for (auto& [stream, use] : pending) block.reads[{stream, 0, SIZE_MAX}] = use;  // an allocator may hand out any of it
  s.memory[memory] = block;
  auto& count = s.of_device[current];
  count.now += bytes;
  count.allocations++;
  count.peak = std::max(count.peak, count.now);
}

inline void note_free(void* memory) {
  auto& s = state();
  Lock lock(s.mutex);
  auto at = s.memory.find(memory);
  if (at == s.memory.end()) return;
  Block& block = at->second;
  Clock owner = s.clocks[block.owner];
  join(owner, s.host);
  for (auto* uses : {&block.reads, &block.writes})
    for (auto& [place, use] : *uses) {
      auto stream = std::get<0>(place);
      if (stream == block.owner || use.freed || has_seen(owner, stream, use.time)) continue;
      // record_stream means an event at this moment: it also covers what that stream has already waited for
      bool named = false;
      for (auto recorded : block.recorded)
        named = named || recorded == stream || has_seen(s.clocks[recorded], stream, use.time);
      if (!named) s.pending[block.owner][stream] = {use.time, use.op, true};
    }
  s.of_device[block.owner >> 40].now -= block.bytes;
  s.memory.erase(at);
}

// An operation is launched on a stream: it must be ordered after whoever used its memory.
inline void launch(StreamKey stream, const std::string& op, const std::vector<Span>& reads,
                   const std::vector<Span>& writes) {
  if (capturing()) return;
  auto& s = state();
  std::vector<std::string> found;
  {
    Lock lock(s.mutex);
    Clock& clock = s.clocks[stream];
    join(clock, s.host);
    uint64_t now = ++clock[stream];
    s.launches++;
    s.ops[op].insert(stream);
    auto check = [&](std::map<Place, Use>& uses, const Span& span, const char* kind) {
      for (auto& [place, use] : uses)
        if (auto [other, begin, end] = place;
            other != stream && begin < span.end && span.begin < end && !has_seen(clock, other, use.time))
          found.push_back(std::string(use.freed ? "REUSE (freed, no record_stream): " : "RACE: ") + op + " on " +
                          name_of(stream) + " " + kind + " of " + use.op + " on " + name_of(other));
    };
    for (auto& span : reads) {
      auto at = s.memory.find(span.memory);
      if (at == s.memory.end()) continue;
      check(at->second.writes, span, "reads the result");
      at->second.reads[{stream, span.begin, span.end}] = {now, op};
    }
    for (auto& span : writes) {
      auto at = s.memory.find(span.memory);
      if (at == s.memory.end()) continue;
      check(at->second.writes, span, "overwrites the result");
      check(at->second.reads, span, "overwrites the input");
      at->second.writes[{stream, span.begin, span.end}] = {now, op};
    }
  }
  for (auto& each : found) note_fault(each);
}
