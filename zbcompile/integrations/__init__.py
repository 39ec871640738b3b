"""Pipelines in the libraries of Hugging Face. Needs `pip install 'zbcompile[huggingface]'`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbcompile.errors import PipelineError

if TYPE_CHECKING:
    from zbcompile.integrations.accelerator import PipelineAccelerator as PipelineAccelerator
    from zbcompile.integrations.trainer import PipelineTrainer as PipelineTrainer

_HOME = {"PipelineAccelerator": "accelerator", "PipelineTrainer": "trainer"}
__all__ = ["PipelineAccelerator", "PipelineTrainer"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import transformers and accelerate on first use. Raises PipelineError if one of them is not
    installed."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("accelerate", "transformers"):
        try:
            import_module(package)
        except ImportError as error:
            raise PipelineError(
                f"zbcompile.integrations.{name} needs {package}, which cannot be imported"
                f" ({error}). Install it with pip install 'zbcompile[huggingface]'."
            ) from None
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
