"""From an nn.Module to one graph: torch.export, canonicalisation, and what would be lost in silence."""
