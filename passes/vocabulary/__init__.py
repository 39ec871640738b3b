"""Vocabulary parallelism: the output layer and its loss on all ranks of a pipeline."""
