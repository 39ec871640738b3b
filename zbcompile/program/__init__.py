"""The compiled program of a rank, its manifest and its files."""
