"""The queue over HTTP: one file of routes for each side, and what they share."""
