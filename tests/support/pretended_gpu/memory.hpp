// Memory of the device and pinned memory, both the host's own; and the generator: a seed and an offset, 16 bytes.
#pragma once
#include "order.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

inline void free_device(void* memory) {
  note_free(memory);
  free(memory);
}
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes) {
      TORCH_CHECK(posix_memalign(&memory, 512, bytes) == 0, "CUDA out of memory (pretended)");
      memset(memory, 0xFF, bytes);  // NaN: what reads it before it is written shows
      note_allocation(memory, bytes);
    }
    return {memory, memory, &free_device, Device(CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline DeviceMemory device_memory;

inline void free_pinned(void* memory) {
  Lock lock(state().mutex);
  state().pinned.erase(memory);
  free(memory);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, std::max<size_t>(bytes, 1)) == 0);
    Lock lock(state().mutex);
    state().pinned.insert(memory);
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline PinnedMemory pinned_memory;
inline bool is_pinned(const void* memory) {
  Lock lock(state().mutex);
  return state().pinned.count(const_cast<void*>(memory));
}

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  size_t seeded = 0;  // how often it was set
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void settable() {
    TORCH_CHECK(!capturing(), "Cannot call CUDAGeneratorImpl::set_current_seed during CUDA graph capture");
    seeded++;
  }
  void set_current_seed(uint64_t seed) override {
    settable();
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    settable();
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& given) override {
    settable();
    TORCH_CHECK(given.numel() == 16 || given.numel() == 8, "RNG state is wrong size");
    auto* bytes = static_cast<const uint8_t*>(given.data());
    memcpy(&seed_, bytes, 8);
    offset_ = 0;
    if (given.numel() == 16) memcpy(&offset_, bytes + 8, 8);
    TORCH_CHECK(offset_ % 4 == 0, "offset must be a multiple of 4");
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto made = at::detail::empty_cpu({16}, at::kByte);
    memcpy(made.data_ptr(), &seed_, 8);
    memcpy(static_cast<uint8_t*>(made.data_ptr()) + 8, &offset_, 8);
    return made.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
};
inline at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int device = 0; device < MOST_DEVICES; ++device) made.push_back(at::make_generator<Generator>(device));
    return made;
  }();
  return all[index < 0 ? current : index];
}
inline Generator* own(at::Generator& generator) { return static_cast<Generator*>(generator.unsafeGetGeneratorImpl()); }
