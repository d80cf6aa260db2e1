"""Builds and warm-starts a tiny policy from an example's demonstrations, in a minute or two."""
