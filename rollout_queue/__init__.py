"""The rollout queue: hands out tickets, keeps finished groups, and knows the policy version and the servers.

`service.serve` runs it. `api` translates HTTP; `broker` has the operations and commits each decision of `ledger` to the
`store` before it takes effect in memory; `observe` reports.
"""
