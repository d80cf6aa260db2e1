"""Says what keeps a run from learning, or from making steps: tables of causes, each with its test, text and remedy.

`stalls` lists what may be missing for a step, for the stall alarm (I7), and `EPISODES` what goes wrong in episodes.
What explains something else stands before it and takes it along: an update that destroyed the policy before everything
that the policy does since, a tool that fails before the rewards that it leaves equal, limits before the task. A remedy
names settings with their values, and none that is set already.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.collapse import CAUSE
from slipstream.protocol.config import RunConfig
from slipstream.protocol.config.learning_rates import lower_rate
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.rollouts import UNKNOWN_TOOL
from slipstream.protocol.status import FAILING, Cause, GroupCounts, Notice, Stall, WorkerStatus
from slipstream.rollout_queue.observe.changes import ChangeFinder
from slipstream.rollout_queue.observe.notices import printable
from slipstream.rollout_queue.observe.symptoms import Symptoms

# Shares from which on something is named, and from which on it explains what else is wrong.
_SOME, _MANY, _NEARLY_ALL = 0.3, 0.5, 0.9

# Tool calls, rollouts or groups from which a share is taken.
_MIN_SEEN = 8

# A worker that was refused ends, so that nobody says when the fault is mended.
_REFUSED_S = 600.0

# Share of episodes that call a tool, below which the policy does not use its tools, and of how many it is taken.
_FEW, _MIN_EPISODES = 0.1, 24

# Temperatures at which the episodes of a group are nearly the same.
_COLD = 0.3

_MAX_TEXT = 700

_FALL = "reward"

# Finish reasons of rollouts that a limit ended, each with its remedy.
_LIMITS: Mapping[str, Callable[[RunConfig], str]] = {
    "length": lambda config: f"raise {_token_limits(config)}",
    "context": lambda config: (
        f"raise vllm.max_model_len = {config.vllm.max_model_len}, or shorten prompts and tool results"
    ),
    "turn_limit": lambda config: f"raise rollout.max_turns = {config.rollout.max_turns}",
    "timeout": lambda config: f"raise worker.episode_timeout_s = {config.worker.episode_timeout_s:g}",
}

# What to do where most groups are lost for one reason.
_LOST: Mapping[str, str] = {
    reasons.OVERAGE: "episodes take longer than the learner's steps: raise queue.max_staleness, or lower "
    "rollout.max_episode_tokens",
    reasons.TRUNCATED: "none of their rollouts came to an end, and rollout.mask_truncated is on: raise "
    "rollout.max_episode_tokens, rollout.max_turn_tokens or vllm.max_model_len, or set it to false",
    reasons.UNVERIFIED_SERVER: "a server's weights failed their proof, or it left service before it: see its "
    "log and weight_sync.probe_tolerance",
    reasons.EXPIRED: "workers die or lose the queue: see their logs and queue.ticket_timeout_s",
    reasons.OUTLIVED: "episodes never end: see the workers' logs and worker.episode_timeout_s",
    reasons.FINGERPRINT: "workers are refused: see the notices",
    reasons.STEP_NOT_FINITE: "loss or gradient is not finite: lower learner.learning_rate, and see left_out.jsonl",
    reasons.OUT_OF_MEMORY: "the learner's memory does not hold a step: lower learner.token_budget",
}

# The notice that explains a reason, if its kind is another.
_KINDS = {reasons.NO_REWARD: reasons.REWARD}

# Where to fix it if tickets fail for these reasons; any other, in the run file.
_FIX_IN: Mapping[str, str] = dict.fromkeys(
    (
        *(reasons.ROW, reasons.PROMPT, reasons.ENVIRONMENT, reasons.AGENT, reasons.NO_TURN, reasons.ROLE_ALONE),
        *(reasons.REWARD, reasons.NO_REWARD),
    ),
    "in the task {task} or the run file",
) | dict.fromkeys(
    (
        *(reasons.REQUEST_REJECTED, reasons.UNREADABLE, reasons.FINISH_REASON, reasons.MISSING_LOGPROBS),
        *(reasons.BAD_LOGPROBS, reasons.MISSING_VERSIONS, reasons.BAD_VERSIONS, reasons.BAD_EXPERTS),
    ),
    "at the vLLM server, or in the run file",
)


class StallInputs(msgspec.Struct, frozen=True):
    """Inputs of the stall alarm. Times are in seconds.

    Attributes:
        quiet_s: Time without a step, from `StepProgress.quiet_s`.
        alarm_after_s: The alarm is raised after this time without a step.
        session: The newest learner session, 0 before the first.
        found_full: Groups refused for lack of room since the newest step.
        ended: Tickets that ended untrained since the newest step, by reason.
        why_equal: Why groups have rewards that are all equal.
        learner_seen_s_ago, worker_seen_s_ago: None for never.
        waiting_for_servers: Episodes that wait for a server.
    """

    quiet_s: float
    alarm_after_s: float
    stall_after_s: float
    finished: bool
    session: int
    servers: list[Server]
    groups: GroupCounts
    groups_per_step: int
    found_full: int
    ended: Mapping[str, int]
    why_equal: str
    blocked_by: str | None
    learner_seen_s_ago: float | None
    learner_waits_for: str | None
    worker_seen_s_ago: float | None
    gave_up: str | None = None
    waiting_for_servers: int = 0


def judge(inputs: StallInputs) -> Stall:
    """Decide whether the run stands still, since when, and why."""
    stalled = inputs.quiet_s >= inputs.alarm_after_s and not inputs.finished
    why = next(text for holds, text in stalls(inputs) if holds) if stalled else None
    return Stall(stalled, inputs.quiet_s, why, inputs.alarm_after_s)


def stalls(of: StallInputs) -> Sequence[tuple[object, str]]:
    """Return what may be missing on the way from the learner's start to the last group of a step: whether it is, and
    what to do. The first that is missing is the cause."""
    held = of.groups.ready + of.groups.leased
    enough = held >= of.groups_per_step
    needs = f"although {held} groups are there and a step needs {of.groups_per_step}: see its log"
    silent_s = of.stall_after_s / 2
    absent = ", ".join(
        f"{server.name} is {server.state}{f' ({server.reason})' if server.reason else ''}"
        for server in of.servers
        if server.state is not ServerState.SERVING
    )
    others = f"; of the servers, {absent}" if absent else ""
    lost = _mostly_lost(of, held)
    return (
        (of.gave_up, of.gave_up or ""),
        (of.session == 0, "no learner has begun a session: start it with `slipstream learner run.toml`"),
        (
            of.learner_seen_s_ago is None or of.learner_seen_s_ago > silent_s,
            f"the learner was {_heard(of.learner_seen_s_ago)}: see its log, restart it with --resume",
        ),
        (
            all(server.state is not ServerState.SERVING for server in of.servers),
            f"no vLLM server is serving: {absent or 'none is registered'}; see its log, or restart it",
        ),
        (lost, lost),
        (enough and of.learner_waits_for, f"the learner waits for {of.learner_waits_for} {needs}"),
        (
            enough,
            f"the learner makes no step {needs}; where steps take so long, raise queue.stall_after_s = "
            f"{of.stall_after_s:.0f}",
        ),
        (
            of.found_full,
            f"{held} groups fill queue.capacity_bytes = {of.groups.capacity_bytes} and a step needs "
            f"{of.groups_per_step}: raise it",
        ),
        (
            of.worker_seen_s_ago is None or of.worker_seen_s_ago > silent_s,
            f"workers were {_heard(of.worker_seen_s_ago)}: start one with `slipstream worker run.toml`",
        ),
        (
            of.waiting_for_servers,
            f"{of.waiting_for_servers} episodes wait for a vLLM server that answers, and those that are called serving "
            f"do not: see the notices and the servers' logs{others}",
        ),
        (
            of.groups.tickets,
            f"workers hold {of.groups.tickets} tickets and submit no group: see their logs and vLLM's{others}",
        ),
        (of.blocked_by, f"no ticket is given: {of.blocked_by}{others}"),
        (True, f"tickets are free, but the workers ask for none: see their logs{others}"),
    )


def _mostly_lost(of: StallInputs, held: int) -> str:
    """Describe the reason for which most groups ended untrained, if there is one."""
    total = sum(of.ended.values())
    reason = max(of.ended, key=of.ended.__getitem__, default="")
    if total < of.groups_per_step or 2 * of.ended[reason] <= total + held:
        return ""
    remedy = _LOST.get(reason, "see the notices and the logs of the workers")
    if reason == reasons.ZERO_VARIANCE:
        remedy = f"all their rewards are equal: {of.why_equal}"
    lost = f"{of.ended[reason]} of the {total} groups that ended since the last step were lost to {reason}"
    return f"{lost}: {remedy}"


def _heard(seconds_ago: float | None) -> str:
    return "never heard from" if seconds_ago is None else f"last heard from {seconds_ago:.0f} s ago"


class Facts(msgspec.Struct, frozen=True):
    """What the diagnosis looks at.

    Attributes:
        notices: Those of the status; they hold the first error of each tool and reward.
        workers: Those of the status.
        changes: What it found in the run's steps.
    """

    symptoms: Symptoms
    notices: Sequence[Notice]
    workers: Sequence[WorkerStatus]
    config: RunConfig
    changes: ChangeFinder

    @property
    def equal(self) -> str | None:
        """How many groups had rewards that are all equal; None while enough of them have not."""
        symptoms, longer = self.symptoms, self.symptoms.longer
        if symptoms.equal_in_a_row >= symptoms.patience:
            return f"{symptoms.equal_in_a_row} groups in a row"
        if len(longer) == longer.size and longer.equal > _NEARLY_ALL * len(longer):
            return f"{longer.equal} of the last {len(longer)} groups"
        return None

    @property
    def flat(self) -> str | None:
        """How many steps had no gradient; None while too few."""
        steps = self.symptoms.flat_steps
        return f"the gradient of the newest {steps} steps was 0" if steps >= self.symptoms.patience_steps else None

    @property
    def rollouts(self) -> int:
        return self.symptoms.newest.finished.total()

    @property
    def cut_share(self) -> float:
        """Share of the newest rollouts that a limit ended."""
        return sum(self.symptoms.newest.finished[reason] for reason in _LIMITS) / max(1, self.rollouts)

    @property
    def read(self) -> str:
        """The command that shows rollouts. Without `slipstream up` only the user knows the run file's real name."""
        run_file = self.config.run_file if self.config.run_file.is_file() else "run.toml"
        return f"slipstream rollouts {shlex.quote(str(run_file))}"

    def newest(self, kind: str, prefix: str = "") -> str:
        """Return the newest notice of a kind that begins with `prefix`, without that."""
        found = (each.text for each in reversed(self.notices) if each.kind == kind and each.text.startswith(prefix))
        return next((text.removeprefix(prefix) for text in found), "see the notices")


def _tools(facts: Facts) -> Iterator[Cause]:
    """Name the tools that fail by their own fault, the worst first."""
    tools = [(name, counts) for name, counts in facts.symptoms.newest.tools.items() if counts.calls >= _MIN_SEEN]
    for name, counts in sorted(tools, key=lambda tool: -tool[1].own_failures / tool[1].calls):
        share = counts.own_failures / counts.calls
        if share >= _SOME:
            error = facts.newest("tool", f"tool {name}: ")
            text = (
                f"tool {name} fails in {counts.own_failures} of its newest {counts.calls} calls ({error}): fix the "
                f"tool first, since the policy gets the error as its answer"
            )
            yield _cause(f"tool {name}", share, text)


def _fall(facts: Facts) -> Iterator[Cause]:
    """Say that the reward fell from one step to the next, and what was changed there."""
    if facts.changes.fall is not None:
        hides_the_task = facts.changes.lost_half or facts.equal
        text = facts.changes.describe_fall(facts.config, facts.read)
        yield _cause(_FALL, 1.0 if hides_the_task else _SOME, text)


def _few_calls(facts: Facts) -> Iterator[Cause]:
    """Say that the policy hardly uses its tools, where rollouts are cut off or rewards are equal meanwhile."""
    newest, rollouts = facts.symptoms.newest, facts.rollouts
    has_tools = newest.offered or facts.symptoms.longer.callers
    if not has_tools or newest.callers >= _FEW * rollouts or rollouts < _MIN_EPISODES:
        return
    if facts.equal or facts.cut_share >= _MANY:
        text = (
            f"{newest.callers} of the newest {rollouts} episodes call a tool: say in chat.system_prompt when to call "
            f"one and show a call, and read with `{facts.read}` what the others write instead; `slipstream doctor` "
            f"says whether the model's template shows tools"
        )
        yield _cause("episodes without tools", 1.0 if facts.equal else _SOME, text)


def _cut_off(facts: Facts) -> Iterator[Cause]:
    """Name the limit at which most rollouts end. Where the policy does not call its tools, that comes first."""
    if facts.rollouts < _MIN_SEEN or facts.cut_share < _MANY or any(_few_calls(facts)):
        return
    counts = {reason: facts.symptoms.newest.finished[reason] for reason in _LIMITS}
    commonest = max(counts, key=counts.__getitem__)
    trains = (
        "none of their tokens trains, since rollout.mask_truncated is on"
        if facts.config.rollout.mask_truncated
        else "they are rewarded as they stand, without what would have followed"
    )
    text = (
        f"{sum(counts.values())} of the newest {facts.rollouts} rollouts did not come to their own end, most of them "
        f"by {commonest}; {trains}: {_LIMITS[commonest](facts.config)}"
    )
    yield _cause("rollouts cut off", facts.cut_share, text)


def _token_limits(config: RunConfig) -> str:
    """Name the limits on tokens that may have ended a rollout: of a single turn, the lower one."""
    turn, episode = config.rollout.max_turn_tokens, config.rollout.max_episode_tokens
    of_turn, of_episode = f"rollout.max_turn_tokens = {turn}", f"rollout.max_episode_tokens = {episode}"
    if config.rollout.max_turns == 1 and turn != episode:
        return of_turn if turn < episode else of_episode
    return f"{of_turn} {'and' if turn == episode else 'or'} {of_episode}"


def _wrong_calls(facts: Facts) -> Iterator[Cause]:
    """Say that the policy does not call the tools as it must, and which it gets wrong most often."""
    tools = facts.symptoms.newest.tools
    calls, wrong = (sum(getattr(of, what) for of in tools.values()) for what in ("calls", "wrong_calls"))
    if calls < _MIN_SEEN or wrong < _MANY * calls:
        return
    worst = max(tools, key=lambda name: tools[name].wrong_calls)
    what = f"call {worst} with other arguments"
    if worst == UNKNOWN_TOOL:
        what = "name no tool that there is or cannot be read"
    text = (
        f"{wrong} of the newest {calls} tool calls are not as a tool wants them, {tools[worst].wrong_calls} of them "
        f"{what}: read them with `{facts.read}`, and say in prompt and descriptions what there is to call, and how"
    )
    yield _cause("tool calls", wrong / calls, text)


def _update(facts: Facts) -> Iterator[Cause]:
    """Name the update that destroyed the policy."""
    rate, symptoms = facts.config.learner.learning_rate, facts.symptoms
    if symptoms.collapse is not None:
        yield _cause(CAUSE, 1.0, symptoms.collapse.describe(rate, lower_rate(facts.config)))
    elif (since := symptoms.sudden) is not None and facts.changes.fall is None and _worst([*_tools(facts)]) is None:
        norm = "" if (at := since.step.get("grad_norm")) is None else f", at a gradient norm of {at:.2g}"
        text = (
            f"since the update of step {since.step.get('step') or 0:g}, with a learning rate of {rate:g}{norm}, hardly "
            f"a group has rewards that differ, as {since.varied} of the {since.compared} before it had, and the reward "
            f"went from {since.step.get('reward') or 0.0:.3g} to {since.rewards / since.groups:.3g}: it has probably "
            f"destroyed the policy. Lower learner.learning_rate = {rate:g}, to {lower_rate(facts.config):g} first"
        )
        yield _cause(CAUSE, 1.0, text)


# What goes wrong in episodes, what explains the others first.
EPISODES = (_tools, _fall, _few_calls, _cut_off, _wrong_calls)


def diagnose(
    symptoms: Symptoms,
    notices: Sequence[Notice],
    workers: Sequence[WorkerStatus],
    config: RunConfig,
    changes: ChangeFinder | None = None,
) -> list[Cause]:
    """Name what keeps the run from learning. Arguments as of `Facts`.

    Returns:
        The worst first; of those that are as bad, the one that may explain the others.
    """
    facts = Facts(symptoms, notices, workers, config, changes or ChangeFinder())
    causes = _of_episodes(facts)
    explains = _worst(causes)
    if explains is not None:
        follows = [f"{facts.equal} had rewards that are all equal, and taught nothing"] if facts.equal else []
        follows += [facts.flat] if facts.flat else []
        if facts.changes.fall is not None and explains.about != _FALL:
            causes = [cause for cause in causes if cause.about != _FALL]
            follows.insert(0, facts.changes.fall.text)
        if follows:
            joined = msgspec.structs.replace(explains, text=f"{explains.text}. Meanwhile {', and '.join(follows)}")
            causes[causes.index(explains)] = joined
    elif facts.equal:
        flat = f"; {facts.flat}" if facts.flat else ""
        text = f"{facts.equal} had rewards that are all equal, and taught nothing{flat}: {_why_equal(facts)}"
        causes.append(_cause("rewards", 1.0, text))
    elif facts.flat:
        text = (
            f"{facts.flat} although rewards differ: nearly every token is masked or clipped. See masked/* and "
            f"clip_ratio/* in {config.run_dir / 'metrics.jsonl'}"
        )
        causes.append(_cause("gradient", 1.0, text))
    if symptoms.checkpoint_failure is not None:
        causes.append(_cause("checkpoints", 1.0, symptoms.checkpoint_failure))
    return sorted([*_refused(workers), *_failing(facts), *causes], key=lambda cause: cause.severity != "bad")


def why_equal(
    symptoms: Symptoms, notices: Sequence[Notice], config: RunConfig, changes: ChangeFinder | None = None
) -> str:
    """Say why the rewards of a group are all equal, even if few such groups were seen. Arguments as of `diagnose`."""
    facts = Facts(symptoms, notices, [], config, changes or ChangeFinder())
    explains = _worst(_of_episodes(facts))
    return explains.text if explains is not None else _why_equal(facts)


def _of_episodes(facts: Facts) -> list[Cause]:
    """List what goes wrong in episodes before they are rewarded. An update that destroyed the policy explains all but
    tools that fail."""
    update = [*_update(facts)]
    return [*update, *(cause for causes in ((_tools,) if update else EPISODES) for cause in causes(facts))]


def _cause(about: str, share: float, text: str) -> Cause:
    return Cause(printable(about), printable(text[:_MAX_TEXT]), "bad" if share >= _NEARLY_ALL else "warn")


def _worst(causes: Sequence[Cause]) -> Cause | None:
    """Return the first cause that is bad enough to explain equal rewards."""
    return next((cause for cause in causes if cause.severity == "bad"), None)


def _refused(workers: Sequence[WorkerStatus]) -> list[Cause]:
    """Name workers that the queue has refused: lately, or at any time if there is no other."""
    others = any(worker.does not in ("refused", "silent", "left") for worker in workers)
    refused = [
        worker for worker in workers if worker.does == "refused" and (worker.seen_s_ago < _REFUSED_S or not others)
    ]
    if not refused:
        return []
    newest = min(refused, key=lambda worker: worker.seen_s_ago)
    many = f"{len(refused):,} workers are refused, the newest" if len(refused) > 1 else "a worker is refused"
    return [_cause("refused workers", _SOME if others else 1.0, f"{many}: {newest.reason}")]


def _failing(facts: Facts) -> list[Cause]:
    """Name the reason for which many tickets yield no group."""
    tickets = facts.symptoms.tickets
    failed = Counter(reason for reason in tickets if reason)
    if len(tickets) < _MIN_SEEN or failed.total() < _SOME * len(tickets):
        return []
    reason, times = failed.most_common(1)[0]
    code = reason.removeprefix(reasons.failed(""))
    text = (
        f"{failed.total()} of the newest {len(tickets)} groups failed, {times} of them for {code}: "
        f"{facts.newest(explaining_kind(reason))}. Fix it {where_to_fix(reason, facts.config)}"
    )
    return [_cause(f"{FAILING}: {code}", failed.total() / len(tickets), text)]


def explaining_kind(reason: str) -> str:
    """Return the kind of the notices that explain why a ticket ended."""
    code = reason.removeprefix(reasons.failed("")).removeprefix(reasons.rejected(""))
    return _KINDS.get(code, code)


def where_to_fix(reason: str, config: RunConfig) -> str:
    """Say where the fault is for which a ticket ended, to stand behind "fix it"."""
    where = _FIX_IN.get(reason.removeprefix(reasons.failed("")), "in the run file")
    return where.format(task=config.task.path)


def _why_equal(facts: Facts) -> str:
    """Say what rewards that are equal within their groups point to, and what to look at in which order."""
    rewards, rollout, read = facts.symptoms.longer.rewards, facts.config.rollout, f"`{facts.read}`"
    if not rewards:
        return f"look at them with {read}"
    larger = f"rollout.group_size = {rollout.group_size}"
    if rollout.temperature <= _COLD:
        warmer = f"raise rollout.temperature = {rollout.temperature:g}: the episodes of a group are nearly the same"
    elif rollout.temperature < 1:
        warmer = f"raise rollout.temperature = {rollout.temperature:g} or {larger}"
    else:
        warmer = f"raise {larger}"
    # One group that succeeded or failed by chance does not make them differ.
    usual, count = rewards.most_common(1)[0]
    if count < _NEARLY_ALL * rewards.total():
        return f"groups differ, the episodes of one group do not. Read them with {read}, and {warmer}"
    then = {
        0: "the task may be too hard: give it easier rows",
        1: "the task may be too easy: give it harder rows",
    }.get(usual, "change the rows")  # type: ignore[call-overload]
    return (
        f"{'all are' if len(rewards) == 1 else 'nearly all are'} {usual:g}. Look at the reward first: read with {read} "
        f"whether it judges the answers rightly. Only if it is right, {then}, or {warmer}"
    )
