"""What went wrong at the learner and did not end it. It travels to the queue's notices with the next step."""

from __future__ import annotations

import msgspec

from protocol.messages import LearnerReport, Notice


class Troubles:
    """Those that the queue was not told of yet."""

    def __init__(self) -> None:
        self._untold: list[Notice] = []

    def checkpoint(self, text: str) -> None:
        """A checkpoint could not be written."""
        self._untold.append(Notice("checkpoint", text))

    def batch(self, text: str) -> None:
        """A batch was left out."""
        self._untold.append(Notice("batch", text))

    def server(self, text: str) -> None:
        """What a vLLM server samples is no longer as near to the learner's policy as it was."""
        self._untold.append(Notice("server", text))

    def told_in(self, report: LearnerReport) -> LearnerReport:
        """The report with what is untold, which counts as told from here on."""
        told, self._untold = self._untold, []
        return msgspec.structs.replace(report, troubles=told)
