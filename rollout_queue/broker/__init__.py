"""Carries out decisions of the ledger under one lock."""
