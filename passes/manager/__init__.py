"""The passes in one list, and what runs them."""
