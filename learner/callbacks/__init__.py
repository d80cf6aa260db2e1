"""The user's callbacks, by transformers' interface: how they are loaded, what they see, and when they are called."""
