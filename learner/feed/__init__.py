"""Leases groups ahead of the step that trains on them, and packs them into rows."""
