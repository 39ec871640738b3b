"""Forward and backward of a stage as one joint graph, split into F, B, W and BW."""
