"""What forward reads in Python and may change: the premises under which a graph is right."""
