"""Predicted steps and memory, measured passes."""
