"""Batches: splitting into microbatches, padding to few lengths, losses, and the example of a
target."""
