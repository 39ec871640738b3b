"""Values during a trace: those of inputs, numbers left open, and what Python reads."""
