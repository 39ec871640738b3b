"""Processes: groups, channels, transport, agreement, clocks."""
