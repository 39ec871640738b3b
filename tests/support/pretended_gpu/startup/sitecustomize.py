"""On PYTHONPATH: every Python process, also those of torchrun and spawn, begins with the pretended
GPU."""

import importlib.util
import os
import sys

if os.environ.get("PRETENDED_GPU") and "preload.so" in os.environ.get("LD_PRELOAD", ""):
    _name = "pretended_gpu_in_torch"
    _path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "in_torch.py")
    _spec = importlib.util.spec_from_file_location(_name, _path)
    sys.modules[_name] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
