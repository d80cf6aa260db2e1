"""The queue's memory and its decisions: pure, without I/O or HTTP, times as arguments."""
