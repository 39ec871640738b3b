// A CPU-only torch decides when it is compiled that it has no accelerator, and at first use that it has no CUDA; these
// functions answer in their place (LD_PRELOAD), from the moment that the pretended device is there.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>

static const at::CUDAHooksInterface* hooks = nullptr;
extern "C" void pretended_gpu_set_hooks(const at::CUDAHooksInterface* made) { hooks = made; }

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const CUDAHooksInterface* none = new CUDAHooksInterface;
  return hooks ? *hooks : *none;
}
}  // namespace at::detail

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool checked) {
  if (hooks) return c10::DeviceType::CUDA;
  TORCH_CHECK(!checked, "Cannot access accelerator device when none is available.");
  return std::nullopt;
}
bool isAccelerator(c10::DeviceType type) { return hooks && type == c10::DeviceType::CUDA; }
}  // namespace at::accelerator
