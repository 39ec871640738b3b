"""Schedules by name, and the search of an order from costs, with a bound that says what is left."""
