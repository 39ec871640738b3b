"""Recomputation (activation checkpointing) and the byte budgets of stages."""
