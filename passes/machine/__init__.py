"""What operations take on a machine: its profile, FLOPs, fused kernels, seconds."""
