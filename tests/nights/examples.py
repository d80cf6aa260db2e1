"""The examples that a night can be played with, and what it changes in each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.nights.faults import Fault

EXAMPLES = Path(__file__).parents[2] / "examples"

# The example's task, with a tool and a reward that do harm while a file says so.
MULTIPLY = '''
import subprocess, time
from pathlib import Path

from slipstream import Task
from task import accuracy as right, multiply as product, rows

HARM = Path({harm!r})

def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    if (HARM / "tool hangs").exists():
        time.sleep(600)
    if (HARM / "tool floods the terminal").exists():
        print("flood " * 20_000)
    if (HARM / "tool leaves processes").exists():
        subprocess.Popen(["sleep", "1000"])
    if (HARM / "rollout of 5 MB").exists():
        return "9" * 5_000_000
    return product(a, b)

def accuracy(completions, answer, **columns):
    if (HARM / "reward hangs").exists():
        time.sleep(600)
    return right(completions, answer)

task = Task(dataset=rows(4096, seed=1), tools=[multiply], rewards=[accuracy])
fewer = Task(dataset=rows(50, seed=1), tools=[multiply], rewards=[accuracy])
'''

PRETRAINED = """
import time
from pathlib import Path

from slipstream import Task
from task import HELD_OUT, correct, questions

HARM = Path({harm!r})

def accuracy(completions, answer, **columns):
    if (HARM / "reward hangs").exists():
        time.sleep(600)
    return correct(completions, answer)

task = Task(dataset=questions[HELD_OUT:], eval_dataset=questions[:16], rewards=[accuracy])
fewer = Task(dataset=questions[HELD_OUT:][:50], eval_dataset=questions[:16], rewards=[accuracy])
"""


@dataclass(frozen=True)
class Example:
    """A run file that a night hurts.

    Attributes:
        folder: Has run.toml, task.py and build_model.py.
        model: Folder of the model that build_model.py writes.
        task: Text of the night's own task file, with `{harm!r}` for the folder of files that make it do harm.
        servers: How many `slipstream up` starts.
        joined: Whether another server joins.
        workers: How many `slipstream up` starts; another one joins.
        settings: What else is changed in the run file.
        dtype: Type in which servers hold the weights.
        mean_off, worst_off: Nats between a label and what the weights of its version give in float32: the mean over all
            tokens, and the largest of one token. Both hold preemptions.
        grows_bytes: How much the memory of one process may grow once it is warm.
        keep_every: Of so many versions in a row, the weights of the first two are kept.
        disk_bytes: Size of the run's own disk; it holds three checkpoints.
        without: Faults that need what the task does not have.
    """

    folder: Path
    model: Path
    task: str
    servers: int
    joined: bool
    workers: int
    settings: tuple[str, ...]
    checkpoint_every: int
    dtype: Literal["float32", "bfloat16"]
    mean_off: float
    worst_off: float
    grows_bytes: int
    keep_every: int
    disk_bytes: int
    without: tuple[str, ...] = ()

    def bears(self, fault: Fault) -> bool:
        """Whether a night with it can have that fault."""
        return fault.name not in self.without and (self.joined or fault.target != "joined")


BY_NAME = {
    "multiply": Example(
        folder=EXAMPLES / "multiply",
        model=EXAMPLES / "multiply" / "models" / "seed-0",
        task=MULTIPLY,
        servers=2,
        joined=True,
        workers=2,
        # The learning rate is low, or all rewards of a group are soon equal, and no step is made of them.
        settings=("--learner.learning_rate", "5e-5", "--worker.episodes", "32"),
        checkpoint_every=10,
        dtype="float32",
        mean_off=2e-4,
        worst_off=2e-4,
        grows_bytes=200 << 20,
        keep_every=1,
        disk_bytes=400 << 20,
    ),
    "pretrained": Example(
        folder=EXAMPLES / "pretrained",
        model=EXAMPLES / "pretrained" / "models" / "smollm2-135m",
        task=PRETRAINED,
        servers=1,
        joined=False,
        workers=1,
        settings=(
            *("--model.dtype", "bfloat16", "--eval.at_start", "false"),
            *("--learner.learning_rate", "5e-6", "--worker.episodes", "16", "--vllm.max_num_seqs", "32"),
        ),
        checkpoint_every=5,
        dtype="bfloat16",
        # Without faults the mean is 0.03 to 0.06 (docs/first_model.md), the largest below 2.
        mean_off=0.1,
        worst_off=3.0,
        # The learner's activations and a checkpoint come and go.
        grows_bytes=2 << 30,
        keep_every=20,
        disk_bytes=8 << 30,
        without=("tool hangs", "tool floods the terminal", "tool leaves processes", "rollout of 5 MB"),
    ),
}
