"""The rules that a graph must obey after each pass, and the check of them."""
