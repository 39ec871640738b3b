"""Batches: splitting into microbatches, losses, and the example of a target."""
