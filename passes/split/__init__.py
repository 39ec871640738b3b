"""Divides the backward of each stage into B (input gradients) and W (weight gradients)."""
