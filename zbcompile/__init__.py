"""zbcompile: a zero-bubble pipeline compiler for PyTorch."""

from zbcompile.version import __version__ as __version__
