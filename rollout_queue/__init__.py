"""The rollout queue: hands out tickets, keeps finished groups, and knows the policy version and the servers.

`service.serve` runs it. `ledger` decides; `broker` commits each decision to the `store` before it takes effect in
memory; `api` answers requests; `observe` reports.
"""
