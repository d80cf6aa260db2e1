"""Reports of a run for people: metrics, summary, curve, rollouts, trackers and the terminal."""
