"""The common parts of the command lines, and training from the command line."""
