"""The user's model: its parameters and buffers, where each of them lives, and its random state."""
