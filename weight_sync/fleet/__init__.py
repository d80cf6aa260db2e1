"""Who gets which version when: a task a server, the newest version wins, and only the snapshot holds the learner."""
