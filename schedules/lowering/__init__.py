"""From orders to actions with sends, receives and collectives."""
