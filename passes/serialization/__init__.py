"""Graphs as plain data, without pickle."""
