"""Batches: split into microbatches, padded to few lengths, their losses, the example of a target."""
