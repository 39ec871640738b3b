"""What is done with the graphs of a stage: accumulation, overlap, deduplication, printing."""
