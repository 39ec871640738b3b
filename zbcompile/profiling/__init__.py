"""What a recorded step holds, and its files."""
