"""The run as people and monitors see it: rates, ages, waits and the stall alarm, put together as one status."""
