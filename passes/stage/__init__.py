"""The graphs of a stage: extracted, accumulating, merged in pairs; what they send and keep."""
