"""For all tests: examples of properties are bounded in number, never in time, so that a busy machine fails none."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
