"""Command lines: their common parts, and one module for each command."""
