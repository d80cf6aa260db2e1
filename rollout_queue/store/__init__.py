"""Where the ledger and the groups' payloads are kept: `base` says what a store is, one file per kind."""
