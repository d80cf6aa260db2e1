"""Predicts how fast a run goes, from the rates of a run that was measured."""
