"""Planning: which schedule a batch runs in, and in how many microbatches."""
