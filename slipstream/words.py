"""A run's messages name options of the command line; here they name what a script gives in their place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Words:
    """resume: the argument that goes on with a run; name, model: the one that gives a run's name or its model, to which
    that value is given; name_setting: what messages call `run.name`."""

    resume: str
    name: Callable[[str], str]
    model: Callable[[str], str]
    name_setting: str = "run.name"

    def said(self, text: str) -> str:
        """The message as it is to be read in a script."""
        text = re.sub(r"--resume\b", self.resume, text)
        text = re.sub(r"--run\.name (?!and )([^\s;,:]+)", lambda given: self.name(given[1]), text)
        text = re.sub(r"--model\.path ([^\s;,]+)", lambda given: self.model(given[1]), text)
        text = re.sub(r"--run\.name\b", f"another {self.name_setting}", text)
        return re.sub(r"(?m)^run\.name = ", f"{self.name_setting} = ", text)


TRAIN = Words("resume=True", lambda name: f"run={{'name': {name!r}}}", lambda path: f"model={{'path': {path!r}}}")


def of_a_trainer(run_dir: Path) -> Words:
    """Of one of `slipstream.trl`, whose `output_dir` is `run_dir`."""
    return Words(
        "resume_from_checkpoint=True",
        lambda name: f"output_dir={str(run_dir.parent / name)!r}",
        lambda path: f"model={path!r}",
        "output_dir",
    )
