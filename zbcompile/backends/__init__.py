"""Backends, which execute graphs: FX, inductor, CUDA graphs."""
