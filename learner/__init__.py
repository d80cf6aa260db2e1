"""The learner: leases groups from the queue, trains on them, and publishes each new version.

Every optimiser step makes the next policy version. Which tokens a step may train on is decided at the version that it
trains, not at the version at which its groups were leased.
"""
