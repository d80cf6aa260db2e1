"""What people read of a run: its metrics, its summary and curve, and the live line."""
