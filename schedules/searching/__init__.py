"""Searches the order of a step: seeds, annealing over words, and a bound that says what is left."""
