"""Observations for the status beyond the ledger: rates, waits, staleness, the newest reports of learner and workers.

Kept in memory only. After a restart of the queue it fills again within a minute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

from slipstream.protocol import reasons
from slipstream.protocol.messages import LearnerReport, ServerState, WorkerReport
from slipstream.protocol.status import LearnerStatus
from slipstream.rollout_queue.ledger.admission import StepFacts
from slipstream.rollout_queue.ledger.records import Decision, RunState, TicketRecord, TicketState
from slipstream.rollout_queue.ledger.registration import SILENT_S
from slipstream.rollout_queue.observe.connections import ConnectionCounts
from slipstream.rollout_queue.observe.limits import LimitWindow
from slipstream.rollout_queue.observe.notices import Notices
from slipstream.rollout_queue.observe.progress import StepProgress
from slipstream.rollout_queue.observe.prometheus import Histograms
from slipstream.rollout_queue.observe.symptoms import CauseTimes, Symptoms
from slipstream.rollout_queue.observe.waits import EPISODES, LEARNER, SESSION, Waits
from slipstream.rollout_queue.observe.windows import (
    WINDOW_STEPS,
    GroupOutcome,
    NewestTickets,
    RateMeter,
    RecentRollouts,
    StalenessWindow,
    age_of,
)
from slipstream.rollout_queue.observe.workers import WorkerReports

# A learner's wait that begins with this word: no step can be expected meanwhile.
LOADING = "loading"
# The kind of a notice about a checkpoint that could not be written.
CHECKPOINT = "checkpoint"
_MAX_NOTICES_PER_REPORT = 16
_MAX_METRICS = 128
_MAX_RANKS = 256


# Settings that a learner may say to have changed, and characters of each.
_MAX_CHANGED, _MAX_CHANGED_CHARACTERS = 50, 400


class Observations:
    """Collects what happens, for status, metrics, notices and the stall alarm.

    Args:
        now: The broker's clock, seconds; also in all methods.
        groups_per_step: Groups per optimiser step.
        start_s: Maximum time that learner and servers take to start, seconds.
        max_workers: How many workers the queue takes.
    """

    def __init__(
        self,
        now: float,
        groups_per_step: int,
        start_s: float,
        max_workers: int,
    ) -> None:
        self.started = now
        self.histograms = Histograms()
        self.connections = ConnectionCounts(max_workers)
        self.limits = LimitWindow()
        self.workers = WorkerReports(max_workers, self.limits.slots)
        self.progress = StepProgress(now, start_s)
        self.notices = Notices()
        self.symptoms = Symptoms(groups_per_step)
        self.cause_times = CauseTimes()
        self.recent, self.recent_evals = RecentRollouts(), RecentRollouts()
        self.rates = RateMeter(now)
        self.waits = Waits()
        self.staleness = StalenessWindow()
        self.tickets = NewestTickets()
        self.rejections: Counter[str] = Counter()
        # Steps since the history looked last, each with its time.
        self.newest_reports: deque[tuple[float, LearnerReport]] = deque(maxlen=256)
        self._over_age = 0
        self._learner_at: float | None = None
        self._changed: list[str] = []
        self._reports: deque[LearnerReport] = deque(maxlen=WINDOW_STEPS)
        self._learner_waited_s = self._learner_s = 0.0

    def learner_seen(self, now: float) -> None:
        self._learner_at = now
        self.progress.heard(now)

    def session_began(self, now: float, changed: Sequence[str] = ()) -> None:
        """Note a session. `changed`: settings that are others than before."""
        self._learner_at = now
        self._changed = [text[:_MAX_CHANGED_CHARACTERS] for text in changed[:_MAX_CHANGED]]
        self.progress.session_began(now)
        self.symptoms.session_began()
        self.limits.session_began()
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

    def group_came(self, tokens: int, outcome: GroupOutcome, now: float) -> None:
        self.rates.add(now, groups=1, tokens_sampled=tokens)
        self.symptoms.group_came(outcome)

    def decided(self, decision: Decision, now: float) -> None:
        """Note a decision that has taken effect: groups that ended, servers that left service."""
        self.progress.tickets_ended(decision.trains)
        for record in decision.tickets:
            times = self.tickets.note(record, now)
            if record.state is TicketState.LEASED and times.arrived is not None:
                self.histograms.group_age_s(now - times.arrived)
        for server in (record.server for record in decision.servers if decision.run is None):
            if server.state in (ServerState.QUARANTINED, ServerState.DOWN):
                why = server.reason or "no reason was given"
                text = f"vLLM server {server.name} at {server.url} is {server.state}: {why}"
                self.notices.say(reasons.SERVER, text, now, key=f"{server.name} {server.state}", again=True)
            elif server.slow is not None:
                self.notices.say(reasons.SERVER, f"vLLM server {server.name} is slow: {server.slow}", now)

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
        dropped = sum(record.group.tokens for record in ended if record.state is TicketState.DROPPED)
        self.rates.add(now, tokens_dropped=dropped)
        if stepped or trained:
            self.staleness.add_step(trained, report.staleness_max if report else None)
            for record in trained:
                self.histograms.staleness(age_of(record).total)
        for notice in report.notices[:_MAX_NOTICES_PER_REPORT] if report is not None else ():
            self.notices.say(notice.kind, notice.text, now, LEARNER)
            if notice.kind == CHECKPOINT:
                self.symptoms.checkpoint_failure = notice.text
        if not stepped:
            return None
        self.progress.stepped(now)
        self.rates.add(now, steps=1, tokens_trained=report.tokens_trained if report else 0)
        if report is not None:
            self.symptoms.stepped({"step": report.step, "reward": report.reward_mean, **report.metrics})
            self._reports.append(report)
            self.newest_reports.append((now, report))
            self.limits.stepped(report)
            self._learner_waited_s += report.wait_s
            self._learner_s += report.step_s
        wait_share = report.wait_s / report.step_s if report and report.step_s > 0 else 0.0
        facts = StepFacts(len(trained), self._over_age, wait_share)
        self._over_age = 0
        return facts

    def worker_reports(self, report: WorkerReport, now: float) -> None:
        self.workers.report(report, now)
        who = _episodes_of(report.worker_id)
        if report.waiting_for_servers:
            what = f"a server that answers ({report.waiting_for_servers} wait)"
            self.waits.begin(who, what, now, until=now + SILENT_S)
        else:
            self.waits.end(who)
        for notice in report.notices[:_MAX_NOTICES_PER_REPORT]:
            self.notices.say(notice.kind, notice.text, now, report.worker_id, life=f"{report.host} {report.pid}")

    def worker_refused(self, report: WorkerReport, why: str, now: float) -> None:
        """Note that a worker was refused."""
        self.workers.refuse(report, why, now)
        for who in (report.worker_id, _episodes_of(report.worker_id)):
            self.waits.end(who)

    def worker_left(self, worker_id: str) -> None:
        """Note that a worker signed off."""
        self.workers.leave(worker_id)
        for who in (worker_id, _episodes_of(worker_id)):
            self.waits.end(who)

    def worker_awaits_session(self, worker_id: str, now: float) -> None:
        """Note that a worker is not admitted before a learner begins a session."""
        self.workers.seen(worker_id, now)
        self.waits.begin(worker_id, SESSION, now, until=now + SILENT_S)

    def session_came(self, worker_id: str) -> None:
        if self.waits.what(worker_id) == SESSION:
            self.waits.end(worker_id)

    def learner_seen_s_ago(self, now: float) -> float | None:
        return None if self._learner_at is None else now - self._learner_at

    @property
    def median_step_s(self) -> float | None:
        """Median time of the newest steps, seconds; None before the first report."""
        return median(report.step_s for report in self._reports) if self._reports else None

    @property
    def learner_wait_share(self) -> float | None:
        """Share of its time that the learner waited for groups since the queue started."""
        return self._learner_waited_s / self._learner_s if self._learner_s else None

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
            changed=self._changed,
            ranks=newest.ranks[:_MAX_RANKS] if newest else [],
        )


def _episodes_of(worker_id: str) -> str:
    """Name a worker's episodes in the list of waits."""
    return worker_id + EPISODES
