// CUDA graphs: what is launched while a stream is captured is noted, with the stream that it was launched on, the events
// between streams and the messages of NCCL; a replay does it again, on those streams and in their order, so that what
// an event is missing for in the capture is found in the replay.
#pragma once
#include "memory.hpp"

#include <functional>

struct Noted {
  StreamKey stream;
  std::function<void()> run;
};

struct Graph {  // what a capture wrote into memory that was there, and the generators, go back at its end
  std::vector<Noted> ops;
  StreamKey origin = 0;
  std::unordered_map<void*, std::vector<char>> before;
  std::vector<std::pair<uint64_t, uint64_t>> generators;

  void keep(void* memory) {
    auto at = state().memory.find(memory);
    if (at == state().memory.end() || before.count(memory)) return;
    auto* bytes = static_cast<char*>(memory);
    before.emplace(memory, std::vector<char>(bytes, bytes + at->second.bytes));
  }
  void note(StreamKey stream, std::function<void()> run) {
    Lock lock(state().mutex);
    ++state().captured[stream][stream];
    ops.push_back({stream, std::move(run)});
  }
  void begin() {
    ops.clear();
    for (int device = 0; device < MOST_DEVICES; ++device) {
      auto* generator = own(default_generator(device));
      generators.emplace_back(generator->seed_, generator->offset_);
    }
    origin = stream_now();
    state().capture = this;
    state().capturing = std::this_thread::get_id();
    state().captured = {{origin, {}}};
  }
  void end() {
    state().capture = nullptr;
    for (auto& [memory, bytes] : before) {
      auto at = state().memory.find(memory);
      if (at != state().memory.end() && at->second.bytes == bytes.size()) memcpy(memory, bytes.data(), bytes.size());
    }
    before.clear();
    for (int device = 0; device < MOST_DEVICES; ++device)
      std::tie(own(default_generator(device))->seed_, own(default_generator(device))->offset_) = generators[device];
    generators.clear();
    for (auto& [stream, clock] : state().captured)
      TORCH_CHECK(!clock.count(stream) || has_seen(state().captured[origin], stream, clock.at(stream)),
                  "CUDA error: capturing stream has unjoined work (", name_of(stream), ")");
  }
};

struct OnStream {  // as torch.cuda.stream
  OnDevice device;
  int64_t before;
  explicit OnStream(StreamKey key) : device(static_cast<DeviceIndex>(key >> 40)), before(streams[current]) {
    streams[current] = key & ((1LL << 40) - 1);
  }
  ~OnStream() { streams[current] = before; }
};

// The current stream takes the part of the one on which the capture began. The others begin behind what it has been
// given, and it goes on behind them.
inline void replay(Graph& graph) {
  auto own = stream_now();
  std::set<StreamKey> others;
  for (auto& noted : graph.ops)
    if (noted.stream != graph.origin) others.insert(noted.stream);
  auto follow = [](StreamKey later, StreamKey earlier) {
    stand_still(later, pending_on(earlier));
    Lock lock(state().mutex);
    join(state().clocks[later], state().clocks[earlier]);
  };
  for (auto other : others) follow(other, own);
  for (auto& noted : graph.ops) {
    OnStream there(noted.stream == graph.origin ? own : noted.stream);
    noted.run();
  }
  for (auto other : others) follow(own, other);
}
