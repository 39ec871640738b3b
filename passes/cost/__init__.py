"""The cost of operations: FLOPs, bytes and seconds on a machine."""
