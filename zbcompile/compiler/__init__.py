"""The passes in order, from a model to the stage programs of a rank."""
