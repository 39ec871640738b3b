// Operations: the CPU's kernels over the device's memory, launched on the current stream of the tensors' device.
#pragma once
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <functional>

using at::Tensor;
using c10::IValue;
using c10::Storage;
using Stack = torch::jit::Stack;
inline const c10::DispatchKeySet CPU_KEYS(c10::DispatchKey::CPU), CUDA_KEYS(c10::DispatchKey::CUDA);

// ---------------------------------------------------------------- CPU views of device memory, and back
inline void drop_storage(void* held) { delete static_cast<Storage*>(held); }
inline void drop_adopted(void* held) {
  auto* adopted = static_cast<std::pair<Storage, void*>*>(held);
  note_free(adopted->second);
  delete adopted;
}
inline Tensor on_storage(Storage storage, const Tensor& like, c10::DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}
inline Storage storage_of(c10::DataPtr data, size_t bytes, c10::Allocator* allocator) {
  using Impl = c10::StorageImpl;
  return Storage(c10::make_intrusive<Impl>(Impl::use_byte_size_t(), bytes, std::move(data), allocator, true));
}

// Its bytes: two operations may work on different parts of one block at a time.
inline Span span_of(const Tensor& tensor) {
  auto first = static_cast<size_t>(tensor.storage_offset()), last = first;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (!tensor.size(dim)) return {tensor.storage().mutable_data(), 0, 0};
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {tensor.storage().mutable_data(), first * tensor.itemsize(), (last + 1) * tensor.itemsize()};
}

struct View {
  Tensor device, host;
  bool written;
};
struct Views {
  std::unordered_map<c10::StorageImpl*, Storage> storages;  // device -> host
  std::vector<View> tensors;
  std::vector<Span> reads, writes;
  bool any = false;

  Tensor host(const Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    any = true;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    for (auto& view : tensors)
      if (view.device.is_same(tensor)) {
        if (written && !view.written) writes.push_back(span_of(tensor));
        view.written = view.written || written;
        return view.host;
      }
    auto at = storages.find(key);
    if (at == storages.end()) {
      c10::DataPtr data(key->mutable_data(), new Storage(tensor.storage()), &drop_storage, Device(DeviceType::CPU));
      at = storages.emplace(key, storage_of(std::move(data), key->nbytes(), c10::GetAllocator(DeviceType::CPU))).first;
    }
    Tensor made = on_storage(at->second, tensor, CPU_KEYS);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.push_back({tensor, made, written});
    (written ? writes : reads).push_back(span_of(tensor));
    return made;
  }
  Tensor device(const Tensor& made) {
    if (!made.defined() || !made.device().is_cpu()) return made;
    for (auto& view : tensors)
      if (view.host.is_same(made)) return view.device;
    for (auto& [key, storage] : storages)
      if (storage.unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl())
        return on_storage(Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(key)), made, CUDA_KEYS);
    return adopt(made);
  }
  static Tensor adopt(const Tensor& made) {  // memory of a CPU kernel becomes the device's
    void* memory = made.storage().mutable_data();
    if (memory) note_allocation(memory, made.storage().nbytes());
    auto* held = new std::pair<Storage, void*>(made.storage(), memory);
    c10::DataPtr data(memory, held, &drop_adopted, Device(CUDA, current));
    if (memory) fresh().push_back(memory);
    return on_storage(storage_of(std::move(data), made.storage().nbytes(), &device_memory), made, CUDA_KEYS);
  }
  static std::vector<void*>& fresh() {
    thread_local std::vector<void*> made;
    return made;
  }
  void refresh() {  // what an out= or resize_ has resized
    for (auto& view : tensors) {
      if (!view.written) continue;
      auto &host = view.host, &device = view.device;
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      auto* key = device.storage().unsafeGetStorageImpl();
      if (host.storage().data() != key->data() || host.storage().nbytes() != key->nbytes()) {
        Tensor made = adopt(host);
        key->set_nbytes(made.storage().nbytes());
        key->set_data_ptr(std::move(const_cast<c10::DataPtr&>(made.storage().mutable_data_ptr())));
      }
    }
  }
};

// `change` applied to every tensor of an argument or a result.
inline IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& each : value.toTensorVector()) out.push_back(change(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (std::optional<Tensor> each : value.toOptionalTensorList())
      out.push_back(each ? std::optional<Tensor>(change(*each)) : each);
    return out;
  }
  return value;
}
inline void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& see) {
  mapped(value, [&](const Tensor& tensor) {
    if (tensor.defined()) see(tensor);
    return tensor;
  });
}

// ---------------------------------------------------------------- operations of a graph
// A tensor of its own over the same memory: torch frees some temporaries whoever else holds them (ExclusivelyOwned).
inline Tensor snapshot(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? on_storage(tensor.storage(), tensor, CUDA_KEYS) : tensor;
}

inline void write_result(const Tensor& to, const Tensor& from) {
  if (!to.defined() || to.is_same(from) || to.storage().data() == from.storage().data()) return;
  memcpy(to.storage().mutable_data(), from.storage().data(), to.storage().nbytes());
  launch(stream_now(), "replay", {}, {to.storage().mutable_data()});
}
inline void repeat(const c10::OperatorHandle& op, const std::vector<IValue>& inputs, const std::vector<IValue>& outputs) {
  Stack stack(inputs);
  op.callBoxed(&stack);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& to = outputs[i];
    auto& from = stack[stack.size() - outputs.size() + i];
    if (to.isTensor()) write_result(to.toTensor(), from.toTensor());
    if (!to.isTensorList()) continue;
    auto old = to.toTensorVector(), made = from.toTensorVector();
    for (size_t k = 0; k < old.size(); ++k) write_result(old[k], made[k]);
  }
}
inline void note(const c10::OperatorHandle& op, std::vector<IValue> inputs, std::vector<IValue> outputs) {
  for (auto* values : {&inputs, &outputs})
    for (auto& value : *values) value = mapped(value, snapshot);
  state().capture->note(stream_now(), [op, inputs, outputs] { repeat(op, inputs, outputs); });
}

// ---------------------------------------------------------------- the boxed fallback
inline bool draws(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](auto& each) { return each.name() == "generator"; });
}

// Runs on the host; the random numbers of an operation come from a CPU generator seeded by seed and offset.
inline void call_on_host(const c10::OperatorHandle& op, Stack* stack) {
  if (!draws(op)) return op.redispatchBoxed(CPU_KEYS, stack);
  auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  at::Generator from = default_generator(-1);
  int64_t place = -1, numel = 1;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (arguments[i].name() == "generator") {
      place = static_cast<int64_t>(first + i);
      if (value.isGenerator()) from = value.toGenerator();
    }
    if (value.isTensor() && value.toTensor().defined()) numel = std::max(numel, value.toTensor().numel());
  }
  auto* generator = own(from);
  uint64_t mixed = generator->seed_ * 0x9E3779B97F4A7C15ull;
  mixed ^= generator->offset_ * 0xBF58476D1CE4E5B9ull + 0x94D049BB133111EBull;
  if (place >= 0) {
    (*stack)[place] = at::make_generator<at::CPUGeneratorImpl>(mixed);
    op.redispatchBoxed(CPU_KEYS, stack);
  } else {
    auto usual = at::detail::getDefaultCPUGenerator();
    auto kept = usual.get_state();
    usual.set_current_seed(mixed);
    op.redispatchBoxed(CPU_KEYS, stack);
    usual.set_state(kept);
  }
  generator->offset_ += 4 * ((numel + 262143) / 262144);
}

// The device of an operation: that of its tensors, which must agree; else the one it is given; else the current one.
inline DeviceIndex device_of(const std::string& name, const IValue* values, size_t count) {
  DeviceIndex found = -1, given = -1;
  bool list = name.rfind("aten::_foreach", 0) == 0 || name.rfind("aten::_amp_foreach", 0) == 0;
  static const std::unordered_set<std::string> index = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  bool mixes = list || index.count(name), host = false;
  for (size_t i = 0; i < count; ++i) {
    if (values[i].isDevice() && values[i].toDevice().is_cuda()) given = values[i].toDevice().index();
    each_tensor(values[i], [&](const Tensor& tensor) {
      host = host || (tensor.device().is_cpu() && tensor.dim() > 0);
      if (!tensor.is_cuda()) return;
      auto own = tensor.device().index();
      TORCH_CHECK(list || found < 0 || found == own,
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                  static_cast<int>(found), " and cuda:", static_cast<int>(own), "! (", name, ")");
      found = own;
    });
  }
  TORCH_CHECK(mixes || !host || found < 0,
              "Expected all tensors to be on the same device, but found at least two devices, cuda:",
              static_cast<int>(found), " and cpu! (", name, ")");
  return found >= 0 ? found : given;
}

inline bool waits_for_values(const std::string& name, const IValue* values, size_t count) {
  static const std::unordered_set<std::string> waiting = {
      "aten::equal",      "aten::nonzero",    "aten::masked_select",       "aten::_unique2",
      "aten::unique_dim", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::unique_consecutive"};
  if (waiting.count(name)) return true;
  bool mask = false;  // an index by a boolean mask asks the host for its count
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_")
    for (size_t i = 0; i < count; ++i)
      if (values[i].isOptionalTensorList())
        each_tensor(values[i], [&](const Tensor& tensor) { mask = mask || tensor.scalar_type() == at::kBool; });
  return mask;
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto& schema = op.schema();
  size_t count = schema.arguments().size(), first = stack->size() - count;
  std::string name = schema.name();
  OnDevice device(device_of(name, &(*stack)[first], count));
  settle(stream_now());
  auto& results = schema.returns();
  bool view = std::any_of(results.begin(), results.end(),
                          [](auto& each) { return each.alias_info() && !each.alias_info()->isWrite(); });
  std::vector<IValue> inputs;
  bool noted = capturing() && !view;
  if (noted) inputs.assign(stack->end() - count, stack->end());
  if (waits_for_values(name, &(*stack)[first], count)) host_waits(name, stream_now());
  Views views;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    auto* alias = schema.arguments()[i].alias_info();
    bool written = alias && alias->isWrite(), on_device = value.isDevice() && value.toDevice().is_cuda();
    value = mapped(value, [&](const Tensor& tensor) { return views.host(tensor, written); });
    if (on_device) value = Device(DeviceType::CPU);
    views.any = views.any || on_device;
  }
  if (noted)
    for (void* memory : views.writes) state().capture->keep(memory);
  auto& fresh = Views::fresh();
  fresh.clear();
  call_on_host(op, stack);
  views.refresh();
  for (size_t i = stack->size() - results.size(); i < stack->size(); ++i)
    if (views.any) (*stack)[i] = mapped((*stack)[i], [&](const Tensor& tensor) { return views.device(tensor); });
  if (!view) {
    views.writes.insert(views.writes.end(), fresh.begin(), fresh.end());
    launch(stream_now(), name, views.reads, views.writes);
  }
  fresh.clear();
  if (noted) note(op, std::move(inputs), {stack->end() - results.size(), stack->end()});
}

// ---------------------------------------------------------------- operations that are not a CPU kernel over views
using Format = std::optional<c10::MemoryFormat>;
inline Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
                                  std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>,
                                  Format format) {
  OnDevice there(device ? device->index() : -1);
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, CUDA_KEYS, type, format);
}
inline Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice there(device ? device->index() : -1);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, CUDA_KEYS, c10::dtype_or_default(dtype));
}
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  OnDevice there(source.is_cuda() ? source.device().index() : self.device().index());
  if (capturing()) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    note(op, {self, source, non_blocking}, {});
  }
  if (self.is_cuda() && source.is_cuda() && self.device() != source.device()) {  // both current streams take part
    Lock lock(state().mutex);
    auto to = key_of(Guard().getStream(self.device())), from = stream_now();
    join(state().clocks[from], state().clocks[to]);
  }
  settle(stream_now());
  if (self.is_cuda()) settle(key_of(Guard().getStream(self.device())));
  Views views;
  Tensor to = views.host(self, true), from = views.host(source, false);
  if (capturing())
    for (void* memory : views.writes) state().capture->keep(memory);
  {
    at::AutoDispatchBelowAutograd guard;
    to.copy_(from);
  }
  launch(stream_now(), "aten::copy_", views.reads, views.writes);
  if (self.is_cuda() && source.is_cuda() && self.device() != source.device()) {
    Lock lock(state().mutex);
    join(state().clocks[key_of(Guard().getStream(self.device()))], state().clocks[stream_now()]);
  }
  bool to_host = self.device().is_cpu(), from_host = source.device().is_cpu();
  bool pinned = (to_host && is_pinned(self.storage().data())) || (from_host && is_pinned(source.storage().data()));
  if (to_host && !(non_blocking && pinned)) host_waits("copy to the host", stream_now());
  if (from_host && !non_blocking) host_waits("blocking copy to the device", stream_now());
  return self;
}
inline at::Scalar local_scalar(const Tensor& tensor) {
  OnDevice there(tensor.device().index());
  host_waits("item", stream_now());
  Views views;
  Tensor host = views.host(tensor, false);
  launch(stream_now(), "aten::_local_scalar_dense", views.reads, {});
  at::AutoDispatchBelowAutograd guard;
  return at::_local_scalar_dense(host);
}
inline void record_stream(Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}
inline int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return 0;  // by formula
}
inline Tensor& set_storage(Tensor& tensor, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (strides.empty() && !sizes.empty()) {
    auto made = c10::contiguous_strides(sizes);
    strides.assign(made.begin(), made.end());
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return tensor;
}
inline Tensor& set_source(Tensor& tensor, Storage storage) {
  int64_t count = storage.nbytes() / tensor.dtype().itemsize();
  return set_storage(tensor, std::move(storage), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}
inline Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}
inline Tensor& set_nothing(Tensor& tensor) { return set_tensor(tensor, at::empty({0}, tensor.options())); }

// As torch's resize_bytes_cuda, which a torch without CUDA lacks: the memory is the allocator's on the current stream,
// and what stays is copied there.
inline void resize_storage(Storage storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  TORCH_CHECK(!captures_here(), "the pretended GPU records no change of a storage's size");
  OnDevice there(storage.device().index());
  c10::DataPtr made(nullptr, storage.device());
  if (bytes) made = device_memory.allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes())) {
    settle(stream_now());
    memcpy(made.get(), storage.data(), kept);
    launch(stream_now(), "resize_", {{storage.mutable_data(), 0, kept}}, {{made.get(), 0, kept}});
  }
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", sdp_choice);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_source);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
}
