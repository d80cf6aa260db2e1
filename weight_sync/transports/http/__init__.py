"""Weights that servers pull, in ranges, from the learner or from each other."""
