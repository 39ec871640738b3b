"""Programs compiled for the batches met so far, bound to the pipeline's tensors."""
