"""The optimizer of a pipeline: which parameters it updates how, which replica keeps what of its
state, and clipping."""
