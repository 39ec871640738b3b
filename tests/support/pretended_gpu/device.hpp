// What torch asks of a device: which one is current, its streams and events, and that it is there at all.
#pragma once
#include "graphs.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

struct Moment {  // of a stream
  Clock clock;
  Pending pending;
};
struct Event {
  Moment at;
  double when = 0;
  DeviceIndex device = 0;
  std::shared_ptr<Moment> replayed;  // of a captured event, in the replay at hand; its own clock is the capture's
};
inline Moment moment_of(StreamKey stream) { return {state().clocks[stream], pending_on(stream)}; }
inline void follow(StreamKey stream, const Moment& moment) {
  Lock lock(state().mutex);
  join(state().clocks[stream], moment.clock);
  stand_still(stream, moment.pending);
}
inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    Device old(CUDA, current);
    uncheckedSetDevice(device);
    return old;
  }
  Device getDevice() const override { return {CUDA, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < state().devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current = device.index() < 0 ? current : device.index();
  }
  DeviceIndex index_of(Device device) const { return device.index() < 0 ? current : device.index(); }
  c10::Stream make(DeviceIndex index, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, index), id);
  }
  c10::Stream getStream(Device device) const override { return make(index_of(device), streams[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return make(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int) const override {
    Lock lock(state().mutex);
    state().contexts.insert(index_of(device));
    return make(index_of(device), state().next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(state().devices); }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state().mutex);
    if (!*event) *event = new Event;
    state().contexts.insert(stream.device_index());
    auto key = key_of(stream);
    auto& made = *static_cast<Event*>(*event) = {{}, seconds(), stream.device_index(), nullptr};
    if (captures(key)) {
      made.at.clock = state().captured[key];
      made.replayed = std::make_shared<Moment>();
      state().capture->ops.push_back({key, [at = made.replayed] { *at = moment_of(stream_now()); }});
      return;
    }
    join(state().clocks[key], state().host);
    made.at = moment_of(key);
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    if (!event) return;
    auto key = key_of(stream);
    auto& made = *static_cast<Event*>(event);
    if (!made.replayed) {
      TORCH_CHECK(!captures(key), "CUDA error: dependency created on uncaptured work in another stream");
      return follow(key, made.at);
    }
    TORCH_CHECK(captures_here(), "CUDA error: operation not permitted on an event last recorded in a capturing stream");
    join(state().captured[key], made.at.clock);
    state().capture->note(key, [at = made.replayed] { follow(stream_now(), *at); });
  }
  bool queryEvent(void* event) const override {
    refuse_in_capture("event.query");
    Lock lock(state().mutex);
    state().contexts.insert(current);  // CUDA makes a context on the thread's device, not on the event's
    auto& pending = static_cast<Event*>(event)->at.pending;
    return std::all_of(pending.begin(), pending.end(), [](auto& each) { return each->is_over(); });
  }
  bool queryStream(const c10::Stream& stream) const override { return pending_on(key_of(stream)).empty(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream.synchronize", key_of(stream), false);
  }
  void synchronizeEvent(void* event) const override {
    refuse_in_capture("event.synchronize");
    if (event) settle(static_cast<Event*>(event)->at.pending);
    Lock lock(state().mutex);
    if (event) join(state().host, static_cast<Event*>(event)->at.clock);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    std::vector<StreamKey> all;
    {
      Lock lock(state().mutex);
      for (auto& [stream, clock] : state().clocks)
        if (stream >> 40 == (device < 0 ? current : device)) all.push_back(stream);
    }
    for (auto stream : all) settle(stream);
    {
      Lock lock(state().mutex);
      for (auto& [stream, clock] : state().clocks)
        if (stream >> 40 == (device < 0 ? current : device)) join(state().host, clock);
    }
    host_waits("device.synchronize", key_of(device < 0 ? current : device, 0), false);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return (static_cast<Event*>(end)->when - static_cast<Event*>(begin)->when) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    auto at = state().memory.find(data.get());
    if (at != state().memory.end()) at->second.recorded.insert(key_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override {
    Lock lock(state().mutex);
    return state().contexts.count(index);
  }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(state().devices); }
  int getNumGPUs() const override { return state().devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto old = current;
    if (index >= 0) current = index;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index = -1) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index = -1) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  Device getDeviceFromPtr(void* memory) const override {
    Lock lock(state().mutex);
    auto at = state().memory.find(memory);
    return Device(CUDA, at == state().memory.end() ? current : static_cast<DeviceIndex>(at->second.owner >> 40));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};
