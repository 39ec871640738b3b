"""Exports a training step, forward and backward, as one graph of ATen operations."""
