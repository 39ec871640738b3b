"""One file per family of orders, the rule-based list schedulers, and the registry of names."""
