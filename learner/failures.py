"""What ends a run from the learner's side."""

from __future__ import annotations


class LearnerFailed(RuntimeError):
    """The learner cannot go on; the text says why, and what to do."""
