"""Recording of steps, and the origin of a NaN."""
