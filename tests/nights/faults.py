"""The list of faults: what each does, to what, and by which words a run has to name it, and when.

`tests/nights/injuries.py` does them to processes, `tests/nights/simulation.py` those marked `simulated` to the queue's
decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.rollout_worker.inference.failures import AGAIN_AFTER_S

# What may be hurt. `joined` is a server that the night starts, `far` a worker; both are reached through links.
Target = Literal["queue", "worker", "server", "learner", "joined", "far", "run"]
# Where a fault can be put in: in a run with real servers, in one with fakes, in simulated time.
Place = Literal["real", "fake", "simulated"]

EVERYWHERE: tuple[Place, ...] = ("real", "fake", "simulated")
RUNS: tuple[Place, ...] = ("real", "fake")


@dataclass(frozen=True)
class Fault:
    """One thing that can be done to a run.

    Attributes:
        name: In schedules and tables.
        target: What is hurt; of several, the schedule chooses one.
        says: Pattern of the line that names it, on the run's terminal, on that of a process that was started next to
            it, or in the status. `{target}` is the name of what was hurt. Empty: the run bears it, and nothing need be
            said.
        within_s: Seconds until that line.
        lasts_s: The shortest and the longest time until it is undone; 0 for one that happens at once.
        weight: How often it is drawn, next to the others.
        apart_s: Seconds between two of it: failures of user code that continue are told once.
    """

    name: str
    target: Target
    says: str = ""
    within_s: float = 15.0
    lasts_s: tuple[float, float] = (0.0, 0.0)
    weight: int = 2
    apart_s: float = 0.0
    places: tuple[Place, ...] = RUNS


_ENDED = r"{target} ended with code 137"
# Told once it has lasted for 10 s, by a look that may take 5 s.
_SILENT = r"server {target}\b.* is (down|stale|quarantined|joining)\b.*answer"
# A step whose end was not told yet when the next one began is one step with it, of two hours.
_SET = r"clock was set {way} by [37],\d\d\d s"

FAULTS = (
    Fault("kill queue", "queue", _ENDED, places=EVERYWHERE),
    Fault("kill worker", "worker", _ENDED, places=EVERYWHERE),
    Fault("kill server", "server", _ENDED, places=EVERYWHERE),
    Fault("kill learner", "learner", _ENDED, 30, weight=1, places=EVERYWHERE),
    Fault("kill joined server", "joined", r"server joined\b.* is (down|joining)\b", 20, weight=1),
    Fault("kill far worker", "far", weight=1),
    Fault("stop server", "server", _SILENT, 20, (15, 20), places=EVERYWHERE),
    Fault("stop queue", "queue", r"terminal: .*the queue has not answered", 20, (12, 16), places=EVERYWHERE),
    Fault("stop worker", "worker", "", 20, (5, 15), places=EVERYWHERE),
    Fault(
        "stop learner",
        "learner",
        r"not heard from the learner|learner.*(silent|no sign)",
        35,
        (30, 35),
        weight=1,
        places=EVERYWHERE,
    ),
    Fault("duty-cycle server", "server", "", 20, (10, 20)),
    Fault("duty-cycle worker", "worker", "", 20, (10, 20)),
    Fault("cut link of joined server", "joined", _SILENT, 20, (15, 20)),
    Fault("slow link of joined server", "joined", "", 30, (10, 20), places=EVERYWHERE),
    Fault("lossy link of joined server", "joined", "", 30, (10, 20)),
    Fault("cut link of far worker", "far", "", 30, (5, 20), places=EVERYWHERE),
    Fault("slow link of far worker", "far", "", 30, (10, 20)),
    Fault("lossy link of far worker", "far", "", 30, (10, 20)),
    Fault("refusing link of joined server", "joined", _SILENT, 20, (15, 20)),
    Fault("refusing link of far worker", "far", "", 30, (5, 20)),
    Fault("half-open connections", "queue", "", 30, (8, 12), weight=1),
    Fault("queue out of files", "queue", r"Too many open files", 20, (5, 8), weight=1),
    # Connections that are open continue: it may need no more.
    Fault("worker out of files", "worker", "", 30, (12, 15), weight=1),
    Fault("edited task", "worker", r"another task file", 45, (30, 35), weight=1, apart_s=AGAIN_AFTER_S + 30),
    Fault(
        "two workers of one name",
        "worker",
        r"two workers are called {target}\b",
        90,
        weight=1,
        apart_s=AGAIN_AFTER_S + 90,
    ),
    Fault("port of the queue taken", "queue", r"queue ended with code 2\b", 20, (5, 8), weight=1),
    Fault("metrics that cannot be written", "learner", r"metrics\.jsonl cannot be written", 20, (5, 8), weight=1),
    Fault("stop terminal", "run", "", 20, (3, 6), weight=1),
    Fault("end worker", "worker", r"{target} ended with code 143", weight=1),
    Fault("full disk", "run", r"(?i)(no space left|disk is full|cannot be written|ENOSPC)", 30, (8, 12), weight=1),
    Fault("clock one hour ahead", "run", _SET.replace("{way}", "ahead"), 10, (10, 20)),
    Fault("clock one hour back", "run", _SET.replace("{way}", "back"), 10, (10, 20)),
    Fault("worker out of memory", "worker", weight=1),
    Fault(
        "server of another model",
        "run",
        r"stranger\b.* is (down|quarantined|stale)",
        60,
        weight=1,
        places=("fake",),
    ),
    Fault(
        "wrong swap",
        "server",
        r"server {target}\b.* is quarantined",
        30,
        places=("fake", "simulated"),
    ),
    Fault("pause", "server", r"server {target}\b.* paused by a person", 10, (5, 15), places=EVERYWHERE),
    Fault("sleep", "server", r"sleep: 403", 5),
    Fault("wrong token", "run", r"wrong token: (401|403)", 5),
    Fault("worker with a wrong token", "run", r"stranger.*SLIPSTREAM_TOKEN", 30, weight=1),
    Fault("two learners", "learner", r"second.*the learner of this run lives", 100, weight=1, places=EVERYWHERE),
    Fault("two queues", "queue", r"second.*(in use|another|already)", 20, weight=1),
    Fault("worker with other data", "run", r"other\b.*the data set has 50 rows", 45, weight=1),
    Fault(
        "tool hangs",
        "run",
        r"(tool multiply|call of tools|calls of tools).*(no answer within|has not come back|have not come back)",
        40,
        (8, 12),
        apart_s=AGAIN_AFTER_S + 30,
    ),
    Fault(
        "reward hangs",
        "run",
        r"reward accuracy: no answer within|calls? of rewards ha(s|ve) not come back",
        60,
        (8, 12),
        apart_s=AGAIN_AFTER_S + 30,
    ),
    Fault("tool floods the terminal", "run", "", 20, (3, 5)),
    Fault("tool leaves processes", "run", "", 20, (3, 5)),
    Fault("rollout of 5 MB", "run", "", 20, (3, 5)),
    Fault(
        "truncated checkpoint",
        "learner",
        r"checkpoints/step-\d+ is not taken: it is damaged",
        60,
        weight=1,
        places=EVERYWHERE,
    ),
)

BY_NAME = {fault.name: fault for fault in FAULTS}


def possible(place: Place) -> list[Fault]:
    """List the faults that can be put in there."""
    return [fault for fault in FAULTS if place in fault.places]


def quick(place: Place) -> list[Fault]:
    """List those that a run has told and borne in seconds, so that many fit into a minute."""
    return [fault for fault in possible(place) if fault.within_s <= 20]
