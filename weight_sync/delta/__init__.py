"""Publications as the difference to the version before: exact, for what changed in the wire type alone."""
