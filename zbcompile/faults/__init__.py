"""Faults of ranks: a heartbeat, a report, and the end of all ranks when one fails."""
