"""From an nn.Module to one graph: torch.export, canonicalisation, and the refusal of what would be lost silently."""
