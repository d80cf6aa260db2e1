"""What people and monitors see of a run: rates, ages, waits and the stall alarm, put together as one status."""
