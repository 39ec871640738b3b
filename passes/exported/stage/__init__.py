"""Extracts one graph per stage and pass."""
