"""The compiled program of all ranks, its manifest and its files; the record of a step."""
