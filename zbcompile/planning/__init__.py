"""Planning: where to cut a model, in what order its ranks work, and what they hold, chosen together
by cost."""
