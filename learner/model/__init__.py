"""The policy that trains, and how it scores the tokens of a packed row."""
