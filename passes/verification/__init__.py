"""What must hold of a graph after each pass, and the check of it."""
