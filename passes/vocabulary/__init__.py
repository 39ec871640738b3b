"""Embedding and output layer sharded over the ranks: S and T passes."""
