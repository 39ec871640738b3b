"""Passes over the graphs of a stage: accumulation, overlap, deduplication, printing."""
