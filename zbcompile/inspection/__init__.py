"""`python -m zbcompile.inspect` and `zbcompile.explain`."""
