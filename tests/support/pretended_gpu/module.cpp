// A pretended CUDA device for a CPU-only torch, as a Python module: tensors say "cuda", their memory is the host's, CPU
// kernels compute. `order.hpp` says what is found. `build.py` compiles this.
#include "nccl.hpp"

#include <dlfcn.h>

PYBIND11_MODULE(pretended_gpu, m) {
  namespace py = pybind11;
  auto set_hooks = reinterpret_cast<void (*)(const at::CUDAHooksInterface*)>(dlsym(RTLD_DEFAULT, "pretended_gpu_set_hooks"));
  TORCH_CHECK(set_hooks, "the pretended GPU needs its preload.so in LD_PRELOAD");
  c10::SetAllocator(CUDA, &device_memory);
  set_hooks(new Hooks({}));
  using Group = c10::intrusive_ptr<c10d::Backend>;
  m.def("make_nccl", [](const Group& inner, int rank, int size, uint64_t host, int64_t milliseconds) -> Group {
    return c10::make_intrusive<Nccl>(inner, rank, size, host, std::chrono::milliseconds(milliseconds));
  });
  m.def("set_stack_function", [](py::object found) { state().stack_function = found.release().ptr(); });
  m.def("set_devices", [](int count) { state().devices = count; });
  m.def("set_sync_mode", [](int mode) { state().sync_mode = mode; });
  m.def("sync_mode", [] { return state().sync_mode; });
  m.def("write_faults_to", [](const std::string& path) {
    state().fault_file = open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
  });
  m.def("keep_faults", [](bool keep) { state().writes_faults = keep; });
  m.def("device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice(Device(CUDA, static_cast<DeviceIndex>(index))); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("times_seeded", [](int index) { return own(default_generator(static_cast<DeviceIndex>(index)))->seeded; });
  m.def("is_capturing", [] { return capturing(); });
  m.def("launches", [] { return state().launches; });
  m.def("host_waits", [] { return state().waits; });
  m.def("faults", [] { Lock lock(state().mutex); return state().faults; });
  m.def("syncs", [] { Lock lock(state().mutex); return state().syncs; });
  m.def("contexts", [] { Lock lock(state().mutex); return state().contexts; });
  m.def("milliseconds_between", [](int64_t begin, int64_t end) {
    return Guard().elapsedTime(reinterpret_cast<void*>(begin), reinterpret_cast<void*>(end), 0);
  });
  m.def("communicators", [] { return state().communicators; });
  m.def("streams_of", [](const std::string& op) { Lock lock(state().mutex); return state().ops[op]; });
  m.def("forget", [] {
    Lock lock(state().mutex);
    state().faults.clear();
    state().syncs.clear();
    state().ops.clear();
    state().contexts.clear();
    state().launches = state().waits = 0;
  });
  m.def("memory", [](int index) {
    auto& of = state().of_device[index];
    return std::make_tuple(of.now, of.peak, of.allocations);
  });
  m.def("resize_storage", &resize_storage);
  m.def("reset_peak", [](int index) { state().of_device[index].peak = state().of_device[index].now; });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", [](Graph& graph) { py::gil_scoped_release no_lock; replay(graph); })
      .def("__len__", [](Graph& graph) { return graph.ops.size(); });
}
