"""What machines can do: named profiles, and those that were measured."""
