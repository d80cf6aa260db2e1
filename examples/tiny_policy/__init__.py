"""Tiny policies for the examples: built and warm-started from an example's demonstrations in a minute or two."""
