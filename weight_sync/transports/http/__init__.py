"""Serves weights over HTTP: servers pull them, in ranges, from the learner or from each other."""
