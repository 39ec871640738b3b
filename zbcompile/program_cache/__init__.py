"""What was compiled for the batches that a pipeline met, bound to its tensors."""
