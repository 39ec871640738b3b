"""A user's model and batches: parameters, examples, random state, microbatches."""
