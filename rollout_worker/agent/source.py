"""Episodes of an agent: a program of the user's that owns its loop, and asks the policy at an endpoint of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from protocol import reasons
from protocol.config import RunConfig
from protocol.messages import FinishReason
from rollout_worker import user_code
from rollout_worker.agent import AgentServer, Session
from rollout_worker.agent.session import AgentContext
from rollout_worker.episodes.episode import Episode
from rollout_worker.episodes.limits import Deadline
from rollout_worker.episodes.source import GroupPlan, side_by_side
from rollout_worker.inference.failures import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.task.agent import Agent, AgentResult, check_settings, read_result
from rollout_worker.task.reward_base import OWN_REWARD


@dataclass(slots=True)
class AgentSource:
    """See `base.Driver`: one call of the agent for each episode, behind the boundary around user code."""

    agent: Agent
    stage: AgentContext
    config: RunConfig
    _server: AgentServer | None = field(default=None, init=False)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        check_settings(self.config)
        worker = self.config.worker
        async with AgentServer(worker.agent_host, worker.agent_port, self.config.vllm.max_model_len) as self._server:
            try:
                yield
            finally:
                self._server = None

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        return await side_by_side(plan, partial(self._episode, plan))  # what an agent does before it asks, nobody knows

    async def _episode(self, plan: GroupPlan, affinity: Affinity) -> Episode:
        """Raises `EpisodeFailed`."""
        assert self._server is not None, "the driver is open while tickets run"
        episodes, deadline = self.stage.episodes, Deadline(self.config.worker.episode_timeout_s)
        temperature = self.config.rollout.temperature if plan.own.temperature is None else plan.own.temperature
        session = Session(self.stage, affinity, temperature, deadline)
        endpoint = self._server.open(session)
        began = episodes.clock()
        result, finish_reason = AgentResult(), session.ended_as
        try:
            async with deadline.limit:
                with session.whereabouts.agent():
                    result = await episodes.code.call(
                        self.agent.function,
                        read_result,
                        self.config.ticket_max_age_s,  # the deadline is what ends it; later, its ticket has gone
                        user_code.Kind.AGENT,
                        deadline.paused(),
                        endpoint=endpoint,
                        **self.agent.arguments(plan.row.columns),
                    )
            finish_reason = self._ended(session)
        except TimeoutError:
            if not session.turns:
                detail = f"the agent had no answer in {self.config.worker.episode_timeout_s:g} s"
                raise EpisodeFailed(reasons.TIMEOUT, detail, retryable=True) from None
            finish_reason = "timeout"
            limit = f"worker.episode_timeout_s = {self.config.worker.episode_timeout_s:g}"
            result = AgentResult(ended=f"had not returned within {limit}: raise it, or have it return sooner")
        except user_code.UserCodeError as error:
            finish_reason = self._excused(session, error)
            result = AgentResult(ended=f"raised at the limit {finish_reason}: catch that, and return what there is")
        finally:
            self._server.close(endpoint)
            episodes.sampler.pool.release([affinity])
        episode = session.episode(finish_reason, episodes.clock() - began)
        episode.result = result
        if result.reward is not None:
            episode.rewards[OWN_REWARD] = result.reward
        episode.rollout.metrics |= result.metrics
        episode.rollout.extra |= result.extra
        return episode

    def _ended(self, session: Session) -> FinishReason:
        """What an episode whose agent returned ended as. Raises `EpisodeFailed` where it never had an answer."""
        if session.turns:
            return session.ended_as or "stop"
        if session.failure is not None:
            raise session.failure
        detail = (
            f"{self.agent.name} returned without an answer of the policy, so there is nothing to train on; give "
            f"endpoint.base_url, endpoint.api_key and endpoint.model to its client, and await its requests"
        )
        raise EpisodeFailed(reasons.NO_TURN, detail, retryable=True)

    def _excused(self, session: Session, error: user_code.UserCodeError) -> FinishReason:
        """What an episode whose agent raised ended as, if it raised because a limit was reached. Else raises
        `EpisodeFailed`."""
        if isinstance(error, user_code.NotCalled):
            raise EpisodeFailed(reasons.WORKER_STOPPED, str(error), retryable=True) from None
        if session.failure is not None:
            raise session.failure
        if session.turns and session.ended_as is not None:
            return session.ended_as
        detail = f"{self.agent.name}: {error}"
        raise EpisodeFailed(reasons.AGENT, detail, True, "agent", error.kind, error.where) from None
