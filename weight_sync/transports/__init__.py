"""Carries weights from the learner to the servers."""
