"""The step itself: rank plans, the action loop, stage runs, gradients."""
