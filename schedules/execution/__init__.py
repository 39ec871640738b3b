"""Runs orders without a model: one event loop, memory held, deadlocks shown."""
