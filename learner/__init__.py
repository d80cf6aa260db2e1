"""The learner: leases groups from the queue, trains on them, and publishes each new version.

Every optimiser step makes policy version + 1. What a step may train on is decided at the version that it trains, not at
the one at which its groups were leased.
"""
