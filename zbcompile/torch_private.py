"""Every private PyTorch name that the runtime uses, with the reason and the versions that have it.

Supporting a newer torch starts here and in `passes/torch_private.py`.
"""

from torch.utils import _pytree as pytree  # 2.11-2.13: torch.export's own pytree; torch.utils.pytree is newer

pytree = pytree
