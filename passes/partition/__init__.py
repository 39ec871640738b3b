"""Cuts of the model: where a graph can be cut, which cuts are taken, the stage of every node."""
