"""Episodes of an agent: a program of the user's that owns its loop, and asks the policy at an endpoint of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from protocol import reasons
from protocol.config import ConfigError, RunConfig
from protocol.config.sections.sampling import keeps_mask
from protocol.messages import FinishReason
from rollout_worker import user_code
from rollout_worker.agent import AgentServer, ChatFormats, Session
from rollout_worker.agent.session import AgentContext
from rollout_worker.chat.base import ChatFormat, PromptError
from rollout_worker.data.dataset import RowSample
from rollout_worker.episodes.episode import Episode, NoReward
from rollout_worker.episodes.limits import Deadline
from rollout_worker.episodes.source import GroupPlan, PromptFindings, SourceContext, side_by_side
from rollout_worker.inference.failures import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.task.agent import Agent, AgentResult, check_settings, max_open, read_result
from rollout_worker.task.reward_base import OWN_REWARD, RESULTS, TEXT_CHARACTERS
from rollout_worker.task.task import Task


@dataclass(frozen=True, slots=True)
class AgentSource:
    """Calls the task's agent once for each episode, behind the boundary around user code.

    Attributes:
        formats: Chat formats for the tools that requests name.
        server: Listens for the agents' requests.
    """

    agent: Agent
    chat: ChatFormat
    formats: ChatFormats
    server: AgentServer
    config: RunConfig
    max_open: int
    own_rewards: Sequence[str] = (OWN_REWARD,)
    tool_schemas: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def accepts(cls, task: Task) -> bool:
        return task.agent is not None

    @classmethod
    @asynccontextmanager
    async def open(cls, context: SourceContext) -> AsyncIterator[Self]:
        config, worker, agent = context.config, context.config.worker, context.task.agent
        assert agent is not None
        check_settings(config)
        chat = context.build_chat([])
        formats = ChatFormats(chat, context.build_chat, keeps_mask(config.rollout))
        most = max_open(config, agent, context.code.max_at_once(user_code.Kind.AGENT))
        async with AgentServer(worker.agent_host, worker.agent_port, config.vllm.max_model_len) as server:
            yield cls(Agent(agent, context.task.agent_errors), chat, formats, server, config, most)

    @classmethod
    async def check_samples(cls, context: SourceContext, samples: Sequence[RowSample]) -> list[PromptFindings]:
        """See `EpisodeSource`. Only the agent knows what it will ask, so this checks that the model takes messages."""
        config = context.config
        check_settings(config)
        try:
            await context.build_chat([]).prompt_ids([{"role": "user", "content": "Hello."}])
        except PromptError as error:
            raise ConfigError(
                f"model.path = {config.model.path}: agents send messages, and a message becomes no tokens "
                f"({str(error).splitlines()[0]:.200}); name a template with chat.template = file.jinja, or a model "
                f"that is made for chat"
            ) from None
        return [PromptFindings(None) for _ in samples]

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        # An agent may do anything before its first request, so it holds no slot until then.
        return await side_by_side(plan, partial(self._episode, plan))

    async def _episode(self, plan: GroupPlan, affinity: Affinity) -> Episode:
        """Call the agent once. Raises `EpisodeFailed`."""
        episodes, deadline = plan.episodes, Deadline(self.config.worker.episode_timeout_s)
        temperature = self.config.rollout.temperature if plan.own.temperature is None else plan.own.temperature
        refuse = self.config.agent.unenforced == "refuse"
        shared = AgentContext(self.formats, episodes, self.config.rollout, refuse)
        session = Session(shared, affinity, temperature, deadline)
        endpoint = self.server.open(session)
        began = episodes.clock()
        result, finish_reason, late = AgentResult(), session.ended_as, False
        why = 'the agent returned no reward: return a number or {"reward": ...}'
        try:
            async with deadline.limit:
                with session.agent_clock.agent():
                    result = await episodes.code.call(
                        self.agent.function,
                        read_result,
                        # The deadline ends the call. This bound is longer: its ticket is gone by then.
                        self.config.ticket_max_age_s,
                        user_code.Kind.AGENT,
                        deadline.exclude_waiting(),
                        endpoint=endpoint,
                        **self.agent.arguments(plan.row.columns),
                    )
            finish_reason = self._ended(session)
        except TimeoutError:
            if not session.turns:
                detail = f"the agent had no answer in {self.config.worker.episode_timeout_s:g} s"
                raise EpisodeFailed(reasons.TIMEOUT, detail, retryable=True) from None
            finish_reason, late = "timeout", True
            limit = f"worker.episode_timeout_s = {self.config.worker.episode_timeout_s:g}"
            why = f"the agent had not returned within {limit}: raise it, or have it return sooner"
        except user_code.UserCodeError as error:
            reward = self.agent.reward_of(error) if session.turns and session.failure is None else None
            if reward is not None:
                result = AgentResult(reward=reward, extra={"agent_error": str(error)[:TEXT_CHARACTERS]})
                finish_reason = session.ended_as or "stop"
            else:
                finish_reason = self._excused(session, error)
            why = f"the agent raised at the limit {finish_reason}: catch that, and return what there is"
        finally:
            self.server.close(endpoint)
            episodes.sampler.pool.release([affinity])
        episode = session.episode(finish_reason, episodes.clock() - began)
        episode.reward_inputs = lambda: {RESULTS: result.given}
        episode.why_no_reward = NoReward(reasons.TIMEOUT if late else reasons.NO_REWARD, why)
        if result.reward is not None:
            episode.rewards[OWN_REWARD] = result.reward
        episode.rollout.metrics |= result.metrics
        episode.rollout.extra |= result.extra
        return episode

    def _ended(self, session: Session) -> FinishReason:
        """Return the finish reason where the agent returned. Raises `EpisodeFailed` if it never had an answer."""
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
        """Return the finish reason where the agent raised because a limit was reached. Else raises `EpisodeFailed`."""
        if isinstance(error, user_code.NotCalled):
            raise EpisodeFailed(reasons.WORKER_STOPPED, str(error), retryable=True) from None
        if session.failure is not None:
            raise session.failure
        if session.turns and session.ended_as is not None:
            return session.ended_as
        detail = (
            f"{self.agent.name}: {error}; its episode leaves the group. Where the policy's answer is to blame, "
            f"Task(agent_errors={{{error.kind}: 0.0}}) keeps it, with that reward"
        )
        raise EpisodeFailed(reasons.AGENT, detail, True, "agent", error.kind, error.where) from None
