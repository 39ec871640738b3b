"""The model of a user: parameters and other tensors, where each one is, random state."""
