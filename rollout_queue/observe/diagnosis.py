"""Says what keeps a run from learning: the causes, the likeliest first, each with its remedy.

What explains something else is looked at before it, and takes it along: an update that destroyed the policy before
everything that the policy does since, a tool that fails before the rewards that it leaves equal, limits before the
task. A remedy names settings with their values, and none that is set already.
"""

from __future__ import annotations

import shlex
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.collapse import CAUSE, LOWER, WINDOW_STEPS, Collapse, Row, find_collapse
from slipstream.protocol.config import RolloutSection, RunConfig
from slipstream.protocol.rollouts import UNKNOWN_TOOL
from slipstream.protocol.status import Cause, Notice, Severity, WorkerStatus
from slipstream.rollout_queue.observe.changes import ChangeFinder
from slipstream.rollout_queue.observe.notices import printable
from slipstream.rollout_queue.observe.windows import GroupOutcome, OutcomeWindow

WINDOW_GROUPS = 400

_MIN_IN_A_ROW = 16

_STEPS_IN_A_ROW = 4

# Shares from which on something is named, and from which on it explains what else is wrong.
_SOME, _MANY, _NEARLY_ALL = 0.3, 0.5, 0.9

# The update is blamed for equal rewards in a row from this probability of as many by chance.
_MAX_CHANCE = 1e-4

# Tool calls, rollouts or groups from which a share is taken.
_MIN_SEEN = 8

# A worker that was refused ends, so that nobody says when the fault is mended.
_REFUSED_S = 600.0

# Share of episodes that call a tool, below which the policy does not use its tools, and of how many it is taken.
_FEW, _MIN_EPISODES = 0.1, 24

# Temperatures at which the episodes of a group are nearly the same.
_COLD = 0.3

_MAX_TEXT = 700

# Seconds for which a cause stays that is over: at first, and at most.
HOLD_S, MAX_HOLD_S = 120.0, 1800.0

# Causes that begin and end with an event, so that none of them is near a limit.
_EVENTS = ("refused workers", "checkpoints", CAUSE)

# Causes whose times are remembered; far more than there are kinds, as tools and reasons have names.
_MAX_CAUSES = 256

_FALL = "reward"

# Finish reasons of rollouts that a limit ended.
_LIMITS = ("length", "context", "turn_limit", "timeout")

# Failures that come and go with a process, and say nothing of task and settings.
PASSING = frozenset(
    {
        reasons.failed(reasons.SERVER),
        reasons.failed(reasons.UNVERIFIED_SERVER),
        reasons.failed(reasons.LOST),
        reasons.failed(reasons.WORKER_STOPPED),
        reasons.rejected(reasons.UNVERIFIED_SERVER),
        reasons.rejected(reasons.UNDECODABLE),
        reasons.rejected(reasons.TOO_DEEP),
        reasons.rejected(reasons.TICKET_MISMATCH),
        reasons.rejected(reasons.WORKER_MISMATCH),
    }
)

# The notice that explains a reason, if its kind is another.
_KINDS = {reasons.NO_REWARD: reasons.REWARD}

_OF_THE_TASK = frozenset(
    {
        *(reasons.ROW, reasons.PROMPT, reasons.ENVIRONMENT, reasons.AGENT, reasons.NO_TURN),
        reasons.ROLE_ALONE,
        *(reasons.REWARD, reasons.NO_REWARD),
    }
)

_OF_A_SERVER = frozenset(
    {
        reasons.REQUEST_REJECTED,
        reasons.UNREADABLE,
        reasons.FINISH_REASON,
        reasons.MISSING_LOGPROBS,
        reasons.BAD_LOGPROBS,
        reasons.MISSING_VERSIONS,
        reasons.BAD_VERSIONS,
        reasons.BAD_EXPERTS,
    }
)


@dataclass
class SuddenlyEqual:
    """Compares the groups since a step with those before it.

    A policy that samples for itself (a staleness of 0) may be destroyed so far that no group is worth a step. No later
    step shows it then.

    Attributes:
        step: The step's figures.
        varied, compared: Groups before it whose rewards differ, of how many.
        groups, rewards: Groups since then, and the sum of their mean rewards.
    """

    step: Row
    varied: int
    compared: int
    groups: int = 0
    rewards: float = 0.0

    def describe(self, learning_rate: float) -> str:
        """Describe it, with the remedy. `learning_rate`: the setting's value."""
        norm = "" if (at := self.step.get("grad_norm")) is None else f", at a gradient norm of {at:.2g}"
        step, reward = self.step.get("step") or 0, self.step.get("reward") or 0.0
        return (
            f"since the update of step {step:g}, with a learning rate of {learning_rate:g}{norm}, hardly a group has "
            f"rewards that differ, as {self.varied} of the {self.compared} before it had, and the reward went from "
            f"{reward:.3g} to {self.rewards / self.groups:.3g}: it has probably destroyed the policy. Lower "
            f"learner.learning_rate = {learning_rate:g}, to {learning_rate / LOWER:g} first"
        )


class Symptoms:
    """Collects what the diagnosis looks at. Kept in memory only: after a restart of the queue it fills again.

    Args:
        groups_per_step: Groups per optimiser step.

    Attributes:
        newest: Groups of the last few steps. `longer`: of the last `WINDOW_GROUPS`.
        equal_in_a_row: Newest groups in a row whose rewards are all equal.
        tickets: How the newest tickets ended: the reason of a failure, "" for a group.
        flat_steps: Newest steps in a row whose gradient was 0.
        collapse: The update that destroyed the policy; None before, and once the reward is better than before it.
        sudden: The newest step, if its update seems to have made all rewards equal; see `SuddenlyEqual`.
        checkpoint_failure: Why the newest checkpoint could not be written; None if it was.
    """

    def __init__(self, groups_per_step: int) -> None:
        self.patience = max(_MIN_IN_A_ROW, _STEPS_IN_A_ROW * groups_per_step)
        self.patience_steps = max(_STEPS_IN_A_ROW, -(-_MIN_IN_A_ROW // groups_per_step))
        size = min(self.patience, WINDOW_GROUPS)
        self.newest, self.longer = OutcomeWindow(size), OutcomeWindow(WINDOW_GROUPS)
        self.equal_in_a_row = 0
        self.tickets: deque[str] = deque(maxlen=size)
        self.flat_steps = 0
        self.collapse: Collapse | None = None
        self._steps: deque[Row] = deque(maxlen=WINDOW_STEPS)
        self._earned = 0.0
        self._since: SuddenlyEqual | None = None
        self.checkpoint_failure: str | None = None

    def group_came(self, outcome: GroupOutcome) -> None:
        """Note a group of the training that was accepted."""
        self.newest.add(outcome)
        self.longer.add(outcome)
        self.equal_in_a_row = self.equal_in_a_row + 1 if outcome.equal else 0
        self.tickets.append("")
        if self._since is not None:
            self._since.groups += 1
            self._since.rewards += outcome.reward

    @property
    def sudden(self) -> SuddenlyEqual | None:
        since = self._since
        if since is None or min(since.groups, self.equal_in_a_row) < self.patience:
            return None
        equal_share = (since.compared - since.varied + 1) / (since.compared + 2)
        varied_before = since.compared >= _MIN_SEEN and since.varied >= _SOME * since.compared
        by_chance = equal_share ** min(since.groups, self.equal_in_a_row) > _MAX_CHANCE
        return (
            since
            if varied_before and not by_chance and since.rewards / since.groups <= (since.step.get("reward") or 0.0)
            else None
        )

    def ticket_failed(self, reason: str) -> None:
        """Note a ticket of the training that ended without a group."""
        if reason not in PASSING:
            self.tickets.append(reason)

    def stepped(self, row: Row) -> None:
        """Note a step. `row`: its figures, as of `slipstream.protocol.collapse`."""
        self.flat_steps = self.flat_steps + 1 if row.get("grad_norm") == 0 else 0
        self._steps.append(row)
        self._since = SuddenlyEqual(row, len(self.newest) - self.newest.equal, len(self.newest))
        if self.collapse is None:
            self.collapse = find_collapse([*self._steps])
            before = [reward for of in self._steps if (reward := of.get("reward")) is not None and of is not row]
            self._earned = median(before) if before else 0.0
        elif (row.get("reward") or 0.0) > self._earned:
            self.collapse = None

    def session_began(self) -> None:
        """Forget what a new session of the learner tries anew."""
        self.flat_steps, self.checkpoint_failure, self.collapse, self._since = 0, None, None, None
        self._steps.clear()


@dataclass
class _Seen:
    cause: Cause
    since: float
    first_at: float
    seen_at: float
    times: int = 1
    held: bool = True

    @property
    def hold_s(self) -> float:
        return 0.0 if self.cause.about in _EVENTS else min(HOLD_S * 2.0 ** (self.times - 1), MAX_HOLD_S)


class CauseTimes:
    """Remembers since when each cause has been seen, and how often it came back.

    A cause that is over stays for `HOLD_S`, and twice as long each time that it has come back, at most `MAX_HOLD_S`:
    what is near its limit would come and go. One that gave way to another cause goes at once.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def timed(self, causes: Sequence[Cause], now: float) -> list[Cause]:
        """Return the causes that hold now or did lately, with their times. `now`: current time, seconds."""
        held = {about for about, seen in self._seen.items() if seen.held}
        gave_way = any(cause.about not in held for cause in causes)
        for cause in causes:
            seen = self._seen.get(cause.about)
            if seen is None:
                seen = self._seen[cause.about] = _Seen(cause, now, now, now)
            elif not seen.held:
                seen.since, seen.times = now, seen.times + 1
            seen.cause, seen.seen_at, seen.held = cause, now, True
        abouts = {cause.about for cause in causes}
        for about in held - abouts:
            seen = self._seen[about]
            seen.held = not gave_way and now - seen.seen_at < seen.hold_s
        lately = [seen.cause for about, seen in self._seen.items() if seen.held and about not in abouts]
        while len(self._seen) > _MAX_CAUSES:
            del self._seen[next(iter(self._seen))]
        return [self._timed(cause, now) for cause in (*causes, *lately)]

    def _timed(self, cause: Cause, now: float) -> Cause:
        seen = self._seen[cause.about]
        return msgspec.structs.replace(cause, since_s=now - seen.since, times=seen.times, first_s=now - seen.first_at)


def diagnose(
    symptoms: Symptoms,
    notices: Sequence[Notice],
    workers: Sequence[WorkerStatus],
    config: RunConfig,
    changes: ChangeFinder | None = None,
) -> list[Cause]:
    """Name what keeps the run from learning.

    Args:
        notices: Those of the status; they hold the first error of each tool and reward.
        workers: Those of the status.
        changes: What it found in the run's steps; None for nothing.

    Returns:
        The worst first; of those that are as bad, the one that may explain the others.
    """
    equal = _equal_share(symptoms)
    flat = symptoms.flat_steps >= symptoms.patience_steps
    causes = _of_episodes(symptoms, notices, config, changes)
    explains = _worst(causes)
    follows = []
    if explains is not None and changes is not None and changes.fall is not None and explains.about != _FALL:
        causes = [cause for cause in causes if cause.about != _FALL]
        follows.append(changes.fall.text)
    if explains is not None and equal is not None:
        follows.append(f"{equal} had rewards that are all equal, and taught nothing")
    if explains is not None and flat:
        follows.append(f"the gradient of the newest {symptoms.flat_steps} steps was 0")
    if explains is not None and follows:
        joined = msgspec.structs.replace(explains, text=f"{explains.text}. Meanwhile {', and '.join(follows)}")
        causes[causes.index(explains)] = joined
    elif equal is not None:
        steps = f"; the gradient of the newest {symptoms.flat_steps} steps was 0" if flat else ""
        text = f"{equal} had rewards that are all equal, and taught nothing{steps}: {_why_equal(symptoms, config)}"
        causes.append(_cause("rewards", text, "bad"))
    elif flat:
        causes.append(_cause("gradient", _why_flat(symptoms, config), "bad"))
    refused, failing = _refused(workers), _failing(symptoms, notices, config)
    found = [*refused, *failing, *causes, *_checkpoints(symptoms)]
    return sorted(found, key=lambda cause: cause.severity != "bad")


def why_equal(
    symptoms: Symptoms, notices: Sequence[Notice], config: RunConfig, changes: ChangeFinder | None = None
) -> str:
    """Say why the rewards of a group are all equal, even if few such groups were seen. Arguments as of `diagnose`."""
    explains = _worst(_of_episodes(symptoms, notices, config, changes))
    return explains.text if explains is not None else _why_equal(symptoms, config)


def _of_episodes(
    symptoms: Symptoms, notices: Sequence[Notice], config: RunConfig, changes: ChangeFinder | None
) -> list[Cause]:
    """List what goes wrong in episodes before they are rewarded, what explains the others first."""
    if symptoms.collapse is not None:
        text = symptoms.collapse.describe(config.learner.learning_rate)
        return [_cause(CAUSE, text, "bad"), *_tools(symptoms, notices)]
    tools = [*_tools(symptoms, notices)]
    nothing_else = _worst(tools) is None and (changes is None or changes.fall is None)
    if nothing_else and (sudden := symptoms.sudden) is not None:
        return [_cause(CAUSE, sudden.describe(config.learner.learning_rate), "bad"), *tools]
    few_calls = [*_few_calls(symptoms, config)]
    return [
        *tools,
        *_fall(symptoms, config, changes),
        *(few_calls or _cut_off(symptoms, config)),
        *_wrong_calls(symptoms, config),
    ]


def _fall(symptoms: Symptoms, config: RunConfig, changes: ChangeFinder | None) -> Iterator[Cause]:
    """Say that the reward fell from one step to the next, and what was changed there."""
    if changes is not None and changes.fall is not None:
        hides_the_task = changes.lost_half or _equal_share(symptoms) is not None
        text = changes.describe_fall(config, _rollouts(config))
        yield _cause(_FALL, text, "bad" if hides_the_task else "warn")


def _worst(causes: Sequence[Cause]) -> Cause | None:
    """Return the first cause that is bad enough to explain equal rewards."""
    return next((cause for cause in causes if cause.severity == "bad"), None)


def _cause(about: str, text: str, severity: Severity) -> Cause:
    return Cause(printable(about), printable(text[:_MAX_TEXT]), severity)


def _severity(share: float) -> Severity:
    return "bad" if share >= _NEARLY_ALL else "warn"


def _refused(workers: Sequence[WorkerStatus]) -> Iterator[Cause]:
    """Name workers that the queue has refused: lately, or at any time if there is no other."""
    others = any(worker.does not in ("refused", "silent", "left") for worker in workers)
    refused = [
        worker for worker in workers if worker.does == "refused" and (worker.seen_s_ago < _REFUSED_S or not others)
    ]
    if refused:
        newest = min(refused, key=lambda worker: worker.seen_s_ago)
        many = f"{len(refused):,} workers are refused, the newest" if len(refused) > 1 else "a worker is refused"
        yield _cause("refused workers", f"{many}: {newest.reason}", "warn" if others else "bad")


def _tools(symptoms: Symptoms, notices: Sequence[Notice]) -> Iterator[Cause]:
    """Name the tools that fail by their own fault, the worst first."""
    tools = [(name, counts) for name, counts in symptoms.newest.tools.items() if counts.calls >= _MIN_SEEN]
    for name, counts in sorted(tools, key=lambda tool: -tool[1].own_failures / tool[1].calls):
        share = counts.own_failures / counts.calls
        if share >= _SOME:
            error = _newest(notices, "tool", f"tool {name}: ") or "see the notices"
            text = (
                f"tool {name} fails in {counts.own_failures} of its newest {counts.calls} calls ({error}): fix the "
                f"tool first, since the policy gets the error as its answer"
            )
            yield _cause(f"tool {name}", text, _severity(share))


def _wrong_calls(symptoms: Symptoms, config: RunConfig) -> Iterator[Cause]:
    """Say that the policy does not call the tools as it must, and which it gets wrong most often."""
    tools = symptoms.newest.tools
    calls, wrong = (sum(getattr(of, what) for of in tools.values()) for what in ("calls", "wrong_calls"))
    if calls < _MIN_SEEN or wrong < _MANY * calls:
        return
    worst = max(tools, key=lambda name: tools[name].wrong_calls)
    most = f"{tools[worst].wrong_calls} of them " + (
        "name no tool that there is or cannot be read"
        if worst == UNKNOWN_TOOL
        else f"call {worst} with other arguments"
    )
    text = (
        f"{wrong} of the newest {calls} tool calls are not as a tool wants them, {most}: read them with "
        f"`{_rollouts(config)}`, and say in prompt and descriptions what there is to call, and how"
    )
    yield _cause("tool calls", text, _severity(wrong / calls))


def _few_calls(symptoms: Symptoms, config: RunConfig) -> Iterator[Cause]:
    """Say that the policy hardly uses its tools, where rollouts are cut off or rewards are equal meanwhile."""
    newest = symptoms.newest
    rollouts, has_tools = newest.finished.total(), newest.offered or symptoms.longer.callers
    if not has_tools or newest.callers >= _FEW * rollouts or rollouts < _MIN_EPISODES:
        return
    equal = _equal_share(symptoms) is not None
    if not equal and _cut_share(symptoms) < _MANY:
        return
    text = (
        f"{newest.callers} of the newest {rollouts} episodes call a tool: say in chat.system_prompt when to call one "
        f"and show a call, and read with `{_rollouts(config)}` what the others write instead; `slipstream doctor` says "
        f"whether the model's template shows tools"
    )
    yield _cause("episodes without tools", text, "bad" if equal else "warn")


def _cut_share(symptoms: Symptoms) -> float:
    """Return the share of the newest rollouts that a limit ended."""
    finished = symptoms.newest.finished
    return sum(finished[reason] for reason in _LIMITS) / max(1, finished.total())


def _token_limits(rollout: RolloutSection) -> str:
    """Name the limits on tokens that may have ended a rollout: of a single turn, the lower one."""
    turn, episode = rollout.max_turn_tokens, rollout.max_episode_tokens
    of_turn, of_episode = f"rollout.max_turn_tokens = {turn}", f"rollout.max_episode_tokens = {episode}"
    if rollout.max_turns == 1 and turn != episode:
        return of_turn if turn < episode else of_episode
    return f"{of_turn} {'and' if turn == episode else 'or'} {of_episode}"


def _cut_off(symptoms: Symptoms, config: RunConfig) -> Iterator[Cause]:
    """Name the limit at which most rollouts end."""
    finished, rollout = symptoms.newest.finished, config.rollout
    rollouts = finished.total()
    remedies = {
        "length": f"raise {_token_limits(rollout)}",
        "context": f"raise vllm.max_model_len = {config.vllm.max_model_len}, or shorten prompts and tool results",
        "turn_limit": f"raise rollout.max_turns = {rollout.max_turns}",
        "timeout": f"raise worker.episode_timeout_s = {config.worker.episode_timeout_s:g}",
    }
    counts = {reason: finished[reason] for reason in _LIMITS}
    share = _cut_share(symptoms)
    if rollouts < _MIN_SEEN or share < _MANY:
        return
    commonest = max(counts, key=counts.__getitem__)
    trains = (
        "none of their tokens trains, since rollout.mask_truncated is on"
        if rollout.mask_truncated
        else "they are rewarded as they stand, without what would have followed"
    )
    text = (
        f"{sum(counts.values())} of the newest {rollouts} rollouts did not come to their own end, most of them by "
        f"{commonest}; {trains}: {remedies[commonest]}"
    )
    yield _cause("rollouts cut off", text, _severity(share))


def _failing(symptoms: Symptoms, notices: Sequence[Notice], config: RunConfig) -> Iterator[Cause]:
    """Name the reason for which many tickets yield no group."""
    failed = Counter(reason for reason in symptoms.tickets if reason)
    seen = len(symptoms.tickets)
    if seen < _MIN_SEEN or failed.total() < _SOME * seen:
        return
    reason, times = failed.most_common(1)[0]
    code = reason.removeprefix(reasons.failed(""))
    error = _newest(notices, explaining_kind(reason)) or "see the notices"
    text = (
        f"{failed.total()} of the newest {seen} groups failed, {times} of them for {code}: {error}. Fix it "
        f"{where_to_fix(reason, config)}"
    )
    yield _cause(f"groups that fail: {code}", text, _severity(failed.total() / seen))


def explaining_kind(reason: str) -> str:
    """Return the kind of the notices that explain why a ticket ended."""
    code = reason.removeprefix(reasons.failed("")).removeprefix(reasons.rejected(""))
    return _KINDS.get(code, code)


def where_to_fix(reason: str, config: RunConfig) -> str:
    """Say where the fault is for which a ticket ended, to stand behind "fix it"."""
    code = reason.removeprefix(reasons.failed(""))
    if code in _OF_THE_TASK:
        return f"in the task {config.task.path} or the run file"
    return "at the vLLM server, or in the run file" if code in _OF_A_SERVER else "in the run file"


def _equal_share(symptoms: Symptoms) -> str | None:
    """Return how many groups had rewards that are all equal; None while enough of them have not."""
    if symptoms.equal_in_a_row >= symptoms.patience:
        return f"{symptoms.equal_in_a_row} groups in a row"
    longer = symptoms.longer
    if len(longer) == longer.size and longer.equal > _NEARLY_ALL * len(longer):
        return f"{longer.equal} of the last {len(longer)} groups"
    return None


def _why_equal(symptoms: Symptoms, config: RunConfig) -> str:
    """Say what rewards that are equal within their groups point to, and what to look at in which order."""
    rewards, rollout, read = symptoms.longer.rewards, config.rollout, f"`{_rollouts(config)}`"
    if not rewards:
        return f"look at them with {read}"
    if rollout.temperature <= _COLD:
        warmer = f"raise rollout.temperature = {rollout.temperature:g}: the episodes of a group are nearly the same"
    elif rollout.temperature < 1:
        warmer = f"raise rollout.temperature = {rollout.temperature:g} or rollout.group_size = {rollout.group_size}"
    else:
        warmer = f"raise rollout.group_size = {rollout.group_size}"
    # One group that succeeded or failed by chance does not make them differ.
    usual, count = rewards.most_common(1)[0]
    are = "all are" if len(rewards) == 1 else "nearly all are"
    if count < _NEARLY_ALL * rewards.total():
        return f"groups differ, the episodes of one group do not. Read them with {read}, and {warmer}"
    if usual == 0:
        then = "Only if it is right, the task may be too hard: give it easier rows"
    elif usual == 1:
        then = "Only if it is right, the task may be too easy: give it harder rows"
    else:
        then = "Only if it is right, change the rows"
    return (
        f"{are} {usual:g}. Look at the reward first: read with {read} whether it judges the answers rightly. {then}, "
        f"or {warmer}"
    )


def _why_flat(symptoms: Symptoms, config: RunConfig) -> str:
    """Say why no weight moves although rewards differ."""
    return (
        f"the gradient of the newest {symptoms.flat_steps} steps was 0 although rewards differ: nearly every token is "
        f"masked or clipped. See masked/* and clip_ratio/* in {config.run_dir / 'metrics.jsonl'}"
    )


def _checkpoints(symptoms: Symptoms) -> Iterator[Cause]:
    if symptoms.checkpoint_failure is not None:
        yield _cause("checkpoints", symptoms.checkpoint_failure, "bad")


def _newest(notices: Sequence[Notice], kind: str, prefix: str = "") -> str | None:
    """Return the newest notice of a kind that begins with `prefix`, without that."""
    found = (notice.text for notice in reversed(notices) if notice.kind == kind and notice.text.startswith(prefix))
    return next((text.removeprefix(prefix) for text in found), None)


def _rollouts(config: RunConfig) -> str:
    """Return the command that shows rollouts. Without `slipstream up` only the user knows the run file's real name."""
    run_file = config.run_file if config.run_file.is_file() else "run.toml"
    return f"slipstream rollouts {shlex.quote(str(run_file))}"
