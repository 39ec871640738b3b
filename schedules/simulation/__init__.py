"""How long a step takes, why ranks are idle, and closed forms."""
