"""Schedules as data: actions, placements, costs, orders, and their text and file forms."""
