"""What a trace knows of values: those of inputs, open numbers, and what Python reads."""
