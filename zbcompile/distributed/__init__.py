"""Processes: groups, channels, transport, agreement, faults."""
