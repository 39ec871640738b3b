"""The passes in order, from a model to the program of all ranks."""
