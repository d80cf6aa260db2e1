"""The learner: leases groups from the queue, trains on them, and has each new version published.

Every optimiser step makes policy version + 1. What a step may train on is decided relative to the version that it
trains, not to the one at which its groups were leased.
"""
