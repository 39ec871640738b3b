"""Assigns the nodes of a training step to pipeline stages."""
