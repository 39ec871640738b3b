"""The list of passes, and the manager that runs them."""
