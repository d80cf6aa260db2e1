"""Brings new weights into running servers: takes a snapshot at the learner, sends it to each server, and proves
that the server computes with it."""
