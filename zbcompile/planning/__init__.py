"""Planning: the schedule, the cuts and the recomputation, chosen by predicted cost."""
