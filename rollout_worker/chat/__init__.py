"""Translates between messages and token ids."""
