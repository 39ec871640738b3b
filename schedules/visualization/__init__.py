"""Schedules and timelines as text, SVG, HTML and Chrome traces."""
