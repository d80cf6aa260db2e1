"""Lets each rank of a learner send its share of the weights, led by rank 0.

Rank 0 alone has the fleet, and calls the servers. Another rank has a `ShareFollower`, which keeps this rank's snapshots
and runs a `Sender` for each connection; on rank 0 a `RemoteSender` stands for it. They exchange short messages in JSON,
which name a snapshot by its version; weights travel from each rank straight to the servers.
"""
