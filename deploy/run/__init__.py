"""Starts the processes of a run on this machine and keeps them running until the learner has ended."""
