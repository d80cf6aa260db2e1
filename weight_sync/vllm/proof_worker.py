"""The worker's side of the proof."""

from __future__ import annotations


class ProofMixin:
    """Nothing yet."""
