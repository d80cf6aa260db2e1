"""Who gets which version when: one task a server, newest version wins, and nothing but the snapshot holds the learner."""
