"""Weights from the learner to a server on the same GPU: the server opens the learner's memory and copies from it."""

from __future__ import annotations
