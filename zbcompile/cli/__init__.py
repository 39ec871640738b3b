"""What the command lines share, and training from the command line."""
