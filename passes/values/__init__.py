"""What a trace knows of values: those of inputs, open numbers, and tensors that modules keep."""
