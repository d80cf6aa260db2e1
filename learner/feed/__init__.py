"""From leased groups to packed rows: what a step trains on, kept ready ahead of it."""
