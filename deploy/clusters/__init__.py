"""Places the processes of a run on the machines of a cluster, one file for each scheduler."""
