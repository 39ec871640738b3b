"""Cuts of the model: where to cut a graph into stages, and one graph per stage."""
