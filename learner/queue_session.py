"""A trainer's session at the queue: it leases batches, acknowledges steps and publishes versions.

Our own loop and `slipstream.join` are built on it. It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.feeder import Feeder
from slipstream.learner.feed.recorded_experts import RoutedLayers
from slipstream.learner.feed.step_draft import Batch
from slipstream.protocol import reasons
from slipstream.protocol.client import QueueRefused
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import BeginSession, LearnerReport, RunPosition
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.weights.snapshot import Probe, Score, probe_token_ids


class QueueSession:
    """A session that has begun.

    Attributes:
        position: The run's position after the newest step.
        published: The newest version that was handed to the publisher; None before the first.
    """

    def __init__(
        self, config: RunConfig, client: BlockingQueueClient, publisher: Publisher, begin: BeginSession, vocabulary: int
    ) -> None:
        """Begin a session.

        Args:
            vocabulary: Size of the policy's vocabulary. Probes touch every token id below it.

        Raises:
            ConfigError: Another learner has begun a session meanwhile.
            QueueError: The queue refuses, or cannot be reached.
        """
        self._config, self._client, self._publisher, self._vocabulary = config, client, publisher, vocabulary
        try:
            self.position: RunPosition = client.call(lambda queue: queue.begin_session(begin))
        except QueueRefused as refusal:
            if refusal.reason == reasons.SESSION_SUPERSEDED:
                raise ConfigError(f"--resume: {refusal}") from None
            raise
        publisher.session, publisher.run_id = self.position.session, self.position.run
        self.published: int | None = None

    @contextmanager
    def feeding(self, pin: bool = False, branches: bool = True, routed: RoutedLayers | None = None) -> Iterator[Feeder]:
        """Lease batches ahead of the step; a failure of the publisher ends the wait for one.

        Args:
            pin, branches, routed: As in `Feeder`.
        """
        with Feeder(self._config, self._client, self.position, pin=pin, branches=branches, routed=routed) as feeder:
            self._publisher.on_failure = feeder.fail
            yield feeder

    def acknowledge(self, feeder: Feeder, batch: Batch, report: LearnerReport) -> None:
        """Take the version that the step made. Raises `QueueError` if the queue disagrees."""
        self.position = feeder.trained(batch, report)

    def publish(self, score: Score, hand_over: Callable[[int, Probe], float]) -> float:
        """Publish the newest version, with the probe that proves it.

        Args:
            hand_over: Gives the publisher the version's weights. Returns the seconds that this took.

        Returns:
            What `hand_over` does.
        """
        version = self.position.version
        number = version // self._config.weight_sync.every
        ids = probe_token_ids(self._vocabulary, number, self._config.run.seed)
        probe = Probe.taken(ids, score)
        with self.waiting("publication"):
            blocked_s = hand_over(version, probe)
        self.published = version
        return blocked_s

    def wait_published(self) -> None:
        """Wait until the newest publication counts; see `Publisher.wait`."""
        with self.waiting("publication"):
            self._publisher.wait()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Wrap a wait: if it lasts, the status page says what for (I7)."""
        return self._client.waiting(self.position.session, what)

    def finish(self) -> None:
        """End the run. No session can follow."""
        self._client.call(lambda queue: queue.finish(self.position.session))
