"""The record of a step, and its files."""
