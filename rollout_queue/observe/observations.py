"""Observations for the status beyond the ledger: rates, waits, staleness, the newest reports of learner and workers.

Kept in memory only. After a restart of the queue it fills again within a minute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from protocol import reasons
from protocol.messages import LearnerReport, ServerState, WorkerReport
from protocol.status import LearnerStatus, WorkerStatus
from rollout_queue.ledger.admission import StepFacts
from rollout_queue.ledger.records import Decision, RunState, TicketRecord, TicketState
from rollout_queue.observe.notices import Notices, Rewards, Variance
from rollout_queue.observe.stall import StepProgress
from rollout_queue.observe.windows import WINDOW_STEPS, RateMeter, RecentRollouts, StalenessWindow, Waits

# Names of those who wait, and of what they wait for.
LEARNER, FEEDER = "learner", "learner's feeder"
# A worker that does not fit the last session waits for the next one.
SESSION = "the learner's session"
# A learner's wait that begins with this word: no step can be expected meanwhile.
LOADING = "loading"
_WORKER_KEPT_S = 3600.0
# A few heartbeats. After that a worker is taken to have gone, and its waits are forgotten.
_WAIT_KEPT_S = 60.0
_MAX_WORKERS = 1024
_MAX_FAILURES = 64
_MAX_FAILURE_CHARACTERS = 80
_MAX_REWARDS = 16_384
_MAX_NOTICES_PER_REPORT = 16
_MAX_METRICS = 128
_REPORTED = [name for name in WorkerStatus.__struct_fields__ if name in WorkerReport.__struct_fields__]
_OPEN = (
    *("episodes_in_flight", "episodes_generating", "episodes_waiting", "episodes_in_tools", "episodes_in_judgement"),
    "waiting_for_servers",
)


class _Heard(msgspec.Struct):
    """A worker's newest report. `left`: it has signed off since; its counts stay in the status."""

    report: WorkerReport
    at: float
    left: bool = False

    def lives(self, now: float) -> bool:
        return not self.left and now - self.at <= _WAIT_KEPT_S


class Observations:
    """Collects what happens, for status, metrics, notices and the stall alarm.

    Args:
        now: The broker's clock, seconds; also in all methods.
        groups_per_step: Groups per optimiser step.
        start_s: Maximum time that learner and servers take to start, seconds.
        run_file: Named in commands that notices recommend.
    """

    def __init__(self, now: float, groups_per_step: int, start_s: float, run_file: Path = Path("run.toml")) -> None:
        self.started = now
        self.progress = StepProgress(now, start_s)
        self.notices = Notices()
        self.variance = Variance(groups_per_step, run_file)
        self.recent, self.recent_evals = RecentRollouts(), RecentRollouts()
        self.rates = RateMeter(now)
        self.waits = Waits()
        self.staleness = StalenessWindow()
        self.rejections: Counter[str] = Counter()
        self.loop_lag_s = 0.0
        self._over_age = 0
        self._learner_at: float | None = None
        self._reports: deque[LearnerReport] = deque(maxlen=WINDOW_STEPS)
        self._learner_waited_s = self._learner_s = 0.0
        self._workers: dict[str, _Heard] = {}
        self._rewards: dict[str, Rewards] = {}

    def learner_seen(self, now: float) -> None:
        self._learner_at = now
        self.progress.heard(now)

    def session_began(self, now: float) -> None:
        self._learner_at = now
        self.progress.session_began(now)
        self.waits.end(LEARNER)

    def learner_waits(self, what: str | None, now: float) -> None:
        """Note what the learner waits for; None for nothing."""
        if what is None:
            self.waits.end(LEARNER)
        else:
            self.waits.begin(LEARNER, what, now)
        if what is not None and what.startswith(LOADING):
            self.progress.loads(now)
        else:
            self.progress.loaded(now)

    def group_came(self, ticket_id: str, tokens: int, rewards: Rewards, now: float) -> None:
        self.rates.add(now, groups=1, tokens_sampled=tokens)
        self._rewards[ticket_id] = rewards
        if len(self._rewards) > _MAX_REWARDS:
            del self._rewards[next(iter(self._rewards))]

    def decided(self, decision: Decision, now: float) -> None:
        """Note a decision that has taken effect: groups that ended, servers that left service."""
        self.progress.tickets_ended(decision.trains)
        for record in decision.trains:
            if record.state is TicketState.TRAINED:
                rewards = self._rewards.pop(record.id, None)
                self.variance.ended(rewards is not None and rewards.equal, rewards)
            elif record.state is TicketState.DROPPED:
                rewards = self._rewards.pop(record.id, None)
                if record.reason == reasons.ZERO_VARIANCE:
                    self.variance.ended(True, rewards)
        if (text := self.variance.notice()) is not None:
            self.notices.say(reasons.ZERO_VARIANCE, text, now, key=reasons.ZERO_VARIANCE)
        for server in (record.server for record in decision.servers if decision.run is None):
            if server.state in (ServerState.QUARANTINED, ServerState.DOWN):
                why = server.reason or "no reason was given"
                text = f"vLLM server {server.name} at {server.url} is {server.state}: {why}"
                self.notices.say(reasons.SERVER, text, now)

    def acknowledged(
        self, ended: Sequence[TicketRecord], report: LearnerReport | None, stepped: bool, now: float
    ) -> StepFacts | None:
        """Note what an acknowledgement ended.

        Args:
            ended: Records of the tickets that it changed.
            report: The learner's report of the step, if it sent one.
            stepped: Whether the acknowledgement raised the version.

        Returns:
            The step's facts for admission; None if there was no step.
        """
        trained = [record for record in ended if record.state is TicketState.TRAINED]
        self._over_age += sum(record.reason == reasons.OVERAGE for record in ended)
        if stepped or trained:
            self.staleness.add_step(trained, report.staleness_max if report else None)
        for notice in report.notices[:_MAX_NOTICES_PER_REPORT] if report is not None else ():
            self.notices.say(notice.kind, notice.text, now, LEARNER)
        if not stepped:
            return None
        self.progress.stepped(now)
        self.rates.add(now, steps=1, tokens_trained=report.tokens_trained if report else 0)
        if report is not None:
            self._reports.append(report)
            self._learner_waited_s += report.wait_s
            self._learner_s += report.step_s
        wait_share = report.wait_s / report.step_s if report and report.step_s > 0 else 0.0
        facts = StepFacts(len(trained), self._over_age, wait_share)
        self._over_age = 0
        return facts

    def worker_reports(self, report: WorkerReport, now: float) -> None:
        self._keep(_without_texts(report), now)
        who = _episodes_of(report.worker_id)
        if report.waiting_for_servers:
            what = f"a server that answers ({report.waiting_for_servers} wait)"
            self.waits.begin(who, what, now, until=now + _WAIT_KEPT_S)
        else:
            self.waits.end(who)
        for notice in report.notices[:_MAX_NOTICES_PER_REPORT]:
            self.notices.say(notice.kind, notice.text, now, report.worker_id)

    def worker_seen(self, worker_id: str, now: float) -> None:
        """Note a sign of life without a report."""
        known = self._workers.get(worker_id)
        if known is None or not known.left:  # a long-poll may end after its worker
            self._keep(WorkerReport(worker_id, []) if known is None else known.report, now)

    def worker_left(self, worker_id: str) -> None:
        """Note that a worker signed off."""
        if (known := self._workers.get(worker_id)) is not None:
            known.left = True
        for who in (worker_id, _episodes_of(worker_id)):
            self.waits.end(who)

    def worker_awaits_session(self, worker_id: str, now: float) -> None:
        """Note that a worker is not admitted before a learner begins a session."""
        self.worker_seen(worker_id, now)
        self.waits.begin(worker_id, SESSION, now, until=now + _WAIT_KEPT_S)

    def session_came(self, worker_id: str) -> None:
        if self.waits.what(worker_id) == SESSION:
            self.waits.end(worker_id)

    def _keep(self, report: WorkerReport, now: float) -> None:
        """Keep a report as the newest. Workers silent for long are forgotten, and the oldest of too many."""
        self._workers.pop(report.worker_id, None)
        self._workers[report.worker_id] = _Heard(report, now)
        oldest = next(iter(self._workers))
        while now - self._workers[oldest].at >= _WORKER_KEPT_S or len(self._workers) > _MAX_WORKERS:
            del self._workers[oldest]
            oldest = next(iter(self._workers))

    def learner_seen_s_ago(self, now: float) -> float | None:
        return None if self._learner_at is None else now - self._learner_at

    def capacity_of(self, worker_id: str) -> int:
        """Return how many episodes a worker runs at once; 0 before its first heartbeat."""
        heard = self._workers.get(worker_id)
        return 0 if heard is None else heard.report.capacity

    def worker_seen_s_ago(self, now: float) -> float | None:
        """Return the seconds since any worker was last heard from; None for never."""
        return min((now - heard.at for heard in self._workers.values()), default=None)

    def waiting_for_servers(self, now: float) -> int:
        """Count the episodes that wait for a vLLM server, at workers that are still heard from."""
        heard = [heard.report for heard in self._workers.values() if heard.lives(now)]
        return sum(report.waiting_for_servers for report in heard)

    def on_server(self, name: str, now: float) -> list[str]:
        """Return the workers that may have a request on a draining server: they are still heard from and have not
        reported that they have none."""
        heard = [heard.report for heard in self._workers.values() if heard.lives(now)]
        return sorted(report.worker_id for report in heard if report.draining.get(name) != 0)

    @property
    def median_step_s(self) -> float | None:
        """Median time of the newest steps, seconds; None before the first report."""
        return median(report.step_s for report in self._reports) if self._reports else None

    @property
    def learner_wait_share(self) -> float | None:
        """Share of its time that the learner waited for groups since the queue started."""
        return self._learner_waited_s / self._learner_s if self._learner_s else None

    @property
    def worker_wait_share(self) -> float | None:
        """Share of the time of all workers' slots that was idle because there were no tickets."""
        reports = [heard.report for heard in self._workers.values()]
        capacity_s = sum(report.elapsed_s * report.capacity for report in reports)
        waited_s = sum(report.waited_s * report.capacity for report in reports)
        return min(1.0, waited_s / capacity_s) if capacity_s else None

    @property
    def worker_cpu_ms_per_episode(self) -> float | None:
        reports = [heard.report for heard in self._workers.values()]
        episodes = sum(map(_episodes, reports))
        return 1000 * sum(report.cpu_s for report in reports) / episodes if episodes else None

    def learner(self, run: RunState, now: float) -> LearnerStatus:
        newest = self._reports[-1] if self._reports else None
        step_s = sum(report.step_s for report in self._reports)
        return LearnerStatus(
            session=run.session,
            step=run.step,
            version=run.version,
            reward_mean=newest.reward_mean if newest else None,
            step_s=newest.step_s if newest else None,
            wait_share=sum(report.wait_s for report in self._reports) / step_s if step_s else None,
            seen_s_ago=self.learner_seen_s_ago(now),
            metrics=dict(list(newest.metrics.items())[:_MAX_METRICS]) if newest else {},
        )

    def workers(self, now: float) -> list[WorkerStatus]:
        """Return each worker with its newest counts. A silent one has no open episodes: its tickets went to others."""
        found = []
        for heard in self._workers.values():
            lives, none = heard.lives(now), dict.fromkeys(_OPEN, 0)
            report = heard.report if lives else msgspec.structs.replace(heard.report, **none)
            found.append(_worker_status(report, now - heard.at))
        return found


def _episodes_of(worker_id: str) -> str:
    """Name a worker's episodes in the list of waits."""
    return f"{worker_id}'s episodes"


def _without_texts(report: WorkerReport) -> WorkerReport:
    """Reduce a report to what the status shows: the most frequent failures, no tickets and no texts."""
    most = sorted(report.failures.items(), key=lambda item: -item[1])[:_MAX_FAILURES]
    failures = {name[:_MAX_FAILURE_CHARACTERS]: count for name, count in most}
    return msgspec.structs.replace(report, ticket_ids=[], fingerprint=None, notices=[], failures=failures)


def _episodes(report: WorkerReport) -> int:
    """Count the episodes that a worker's CPU seconds were spent on."""
    return report.episodes_done + report.eval_episodes


def _worker_status(report: WorkerReport, seen_s_ago: float) -> WorkerStatus:
    episodes = _episodes(report)
    return WorkerStatus(
        **{name: getattr(report, name) for name in _REPORTED},
        wait_share=min(1.0, report.waited_s / report.elapsed_s) if report.elapsed_s else 0.0,
        full_share=min(1.0, report.full_s / report.elapsed_s) if report.elapsed_s else 0.0,
        cpu_ms_per_episode=1000 * report.cpu_s / episodes if episodes else None,
        seen_s_ago=seen_s_ago,
    )
