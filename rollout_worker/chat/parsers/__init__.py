"""How tool calls are written in a turn's text: one file for each notation."""
