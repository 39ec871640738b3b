"""Programs, checkpoints and weights on disk."""
