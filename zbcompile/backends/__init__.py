"""What executes a graph: FX, inductor, CUDA graphs."""
