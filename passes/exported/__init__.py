"""From a model to pass graphs: one exported training step with labelled nodes."""
