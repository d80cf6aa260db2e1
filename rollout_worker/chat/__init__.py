"""Chat formats: between messages and token ids."""
