"""accelerate's trackers: which are installed, how each is started and continued, and a thread for each."""
