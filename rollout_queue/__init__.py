"""The rollout queue: hands out tickets, keeps finished groups, and knows the policy version and the servers.

`service.serve` runs it. Decisions (`ticketing`, `training`, `admission`, `door`, `fleet`, `stall`) are pure; `broker`
puts each on disk before it takes effect in memory; the routes are thin.
"""
