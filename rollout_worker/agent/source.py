"""Episodes of an agent: a program of the user's that owns its loop, and asks the policy at its own endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections.sampling import keeps_mask
from slipstream.protocol.messages import FinishReason
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.agent import AgentServer, ChatFormats, Session
from slipstream.rollout_worker.agent.session import AgentClock, AgentContext
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.data.dataset import RowSample
from slipstream.rollout_worker.episodes.episode import Episode, NoReward
from slipstream.rollout_worker.episodes.limits import Deadline
from slipstream.rollout_worker.episodes.source import GroupPlan, PromptFindings, SourceContext, side_by_side
from slipstream.rollout_worker.inference.failures import EpisodeFailed
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.task.agent import (
    ENDPOINT,
    ENDPOINTS,
    Agent,
    AgentResult,
    Endpoint,
    check_settings,
    max_open,
    read_result,
    read_result_of,
)
from slipstream.rollout_worker.task.reward_base import OWN_REWARD, RESULTS, TEXT_CHARACTERS
from slipstream.rollout_worker.task.roles import Roles
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.task.turn_rewards import rewarding


@dataclass(frozen=True, slots=True)
class AgentSource:
    """Calls the task's agent once for each episode, behind the boundary around user code.

    Attributes:
        roles: The roles that it plays; None where it has one.
        formats: Chat formats for the tools that requests name.
        server: Listens for the agents' requests.
    """

    agent: Agent
    roles: Roles | None
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
            roles = context.task.roles
            called = Agent(agent, context.task.agent_errors, roles is not None)
            if roles is None:
                yield cls(called, None, chat, formats, server, config, most)
                return
            for other in roles.others.values():
                _ = other.api_key
            yield cls(called, roles, chat, formats, server, config, most, tuple(roles.trained), roles.described)

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
        others: list[Episode] = []
        outcomes = await side_by_side(plan, partial(self._episode, plan, others))
        return [*outcomes, *others]

    async def _episode(self, plan: GroupPlan, others: list[Episode], affinity: Affinity) -> Episode:
        """Call the agent once. Of an episode with several roles, `others` gets those of all but the first. Raises
        `EpisodeFailed`."""
        episodes, deadline = plan.episodes, Deadline(self.config.worker.episode_timeout_s)
        played = self._opened(plan, affinity, deadline)
        began = episodes.clock()
        result, late = AgentResult(), False
        why = 'the agent returned no reward: return a number or {"reward": ...}'
        if self.roles is not None:
            why = f"the agent returned no reward of it: return {{{', '.join(map(repr, self.roles.trained))}: ...}}"
        raised: FinishReason | None = None
        try:
            async with deadline.limit:
                given = {role: session.turn_rewards for role, session in played.sessions.items()}
                with played.clock.agent(), rewarding(given):
                    result = await episodes.code.call(
                        self.agent.function,
                        read_result if self.roles is None else read_result_of(self.roles.trained),
                        # The deadline ends the call. This bound is longer: its ticket is gone by then.
                        self.config.ticket_max_age_s,
                        user_code.Kind.AGENT,
                        deadline.exclude_waiting(),
                        **played.given,
                        **self.agent.arguments(plan.row.columns),
                    )
            self._check_asked(played)
        except TimeoutError:
            if not played.turns:
                detail = f"the agent had no answer in {self.config.worker.episode_timeout_s:g} s"
                raise EpisodeFailed(reasons.TIMEOUT, detail, retryable=True) from None
            raised, late = "timeout", True
            limit = f"worker.episode_timeout_s = {self.config.worker.episode_timeout_s:g}"
            why = f"the agent had not returned within {limit}: raise it, or have it return sooner"
        except user_code.UserCodeError as error:
            reward = self.agent.reward_of(error) if played.turns and played.failure is None else None
            if reward is not None:
                extra = {"agent_error": str(error)[:TEXT_CHARACTERS]}
                result = AgentResult(reward=reward, extra=extra, by_role=dict.fromkeys(played.sessions, reward))
            else:
                raised = self._excused(played, error)
            why = f"the agent raised at the limit {raised}: catch that, and return what there is"
        finally:
            for endpoint in played.endpoints:
                self.server.close(endpoint)
            episodes.sampler.pool.release(list(played.affinities))
        no_reward = NoReward(reasons.TIMEOUT if late else reasons.NO_REWARD, why)
        first, *rest = [
            self._rollout(
                role, session, result, raised or session.ended_as or "stop", episodes.clock() - began, no_reward
            )
            for role, session in played.sessions.items()
            if session.turns
        ]
        for each in rest:
            each.is_further_role = True
        others += rest
        return first

    def _opened(self, plan: GroupPlan, affinity: Affinity, deadline: Deadline) -> _Played:
        """Open a session for each role that the policy plays; the first has the given tie to a server."""
        episodes = plan.episodes
        temperature = self.config.rollout.temperature if plan.own.temperature is None else plan.own.temperature
        shared = AgentContext(self.formats, episodes, self.config.rollout, self.config.agent.unenforced == "refuse")
        clock = AgentClock(episodes.capacity, episodes.clock)
        prompts = {OWN_REWARD: None} if self.roles is None else self.roles.trained
        affinities = [affinity]
        affinities += [Affinity(siblings=affinity.siblings, born=affinity.born) for _ in range(len(prompts) - 1)]
        sessions = {
            role: Session(shared, tie, temperature, deadline, prompt, clock)
            for (role, prompt), tie in zip(prompts.items(), affinities, strict=True)
        }
        endpoints = {role: self.server.open(session) for role, session in sessions.items()}
        given: dict[str, Any] = {ENDPOINT: endpoints.get(OWN_REWARD)}
        if self.roles is not None:
            untrained = {
                role: Endpoint(other.base_url, other.api_key, other.model, temperature)
                for role, other in self.roles.others.items()
            }
            given = {ENDPOINTS: {**endpoints, **untrained}}
        return _Played(sessions, list(endpoints.values()), affinities, clock, given)

    def _rollout(
        self,
        role: str,
        session: Session,
        result: AgentResult,
        finish_reason: FinishReason,
        total_s: float,
        no_reward: NoReward,
    ) -> Episode:
        """Return what one role said, with its reward."""
        episode = session.episode(finish_reason, total_s)
        episode.reward_inputs = lambda: {RESULTS: result.given}
        episode.why_no_reward = no_reward
        reward = result.reward if self.roles is None else result.by_role.get(role)
        if reward is not None:
            episode.rewards[role] = reward
        episode.rollout.metrics |= result.metrics
        episode.rollout.extra |= result.extra
        if self.roles is not None:
            episode.rollout.role = role
        return episode

    def _check_asked(self, played: _Played) -> None:
        """Raise `EpisodeFailed` if an agent that returned never had an answer."""
        if played.turns:
            return
        if played.failure is not None:
            raise played.failure
        whose = ENDPOINT if self.roles is None else "endpoints['role']"
        refused = next((each.refused for each in played.sessions.values() if each.refused is not None), None)
        remedy = f"give {whose}.base_url, {whose}.api_key and {whose}.model to its client, and await its requests"
        detail = (
            f"{self.agent.name} returned without an answer of the policy, so there is nothing to train on; "
            f"{remedy if refused is None else f'its last request was answered {refused}'}"
        )
        raise EpisodeFailed(reasons.NO_TURN, detail, retryable=True)

    def _excused(self, played: _Played, error: user_code.UserCodeError) -> FinishReason:
        """Return the finish reason where the agent raised because a limit was reached. Else raises `EpisodeFailed`."""
        if isinstance(error, user_code.NotCalled):
            raise EpisodeFailed(reasons.WORKER_STOPPED, str(error), retryable=True) from None
        if played.failure is not None:
            raise played.failure
        if played.turns and played.ended_as is not None:
            return played.ended_as
        detail = (
            f"{self.agent.name}: {error}; its episode leaves the group. Where the policy's answer is to blame, "
            f"Task(agent_errors={{{error.kind}: 0.0}}) keeps it, with that reward"
        )
        raise EpisodeFailed(reasons.AGENT, detail, True, "agent", error.kind, error.where) from None


@dataclass(frozen=True, slots=True)
class _Played:
    """One episode while its agent runs.

    Attributes:
        sessions: One for each role that the policy plays, by name.
        endpoints: Theirs.
        affinities: Theirs.
        clock: Shared by all.
        given: What the agent gets next to its columns.
    """

    sessions: Mapping[str, Session]
    endpoints: Sequence[Endpoint]
    affinities: Sequence[Affinity]
    clock: AgentClock
    given: Mapping[str, Any]

    @property
    def turns(self) -> int:
        """Answers of the policy, in all roles."""
        return sum(session.turns for session in self.sessions.values())

    @property
    def failure(self) -> EpisodeFailed | None:
        """Why a last request could not be sampled."""
        return next((each.failure for each in self.sessions.values() if each.failure is not None), None)

    @property
    def ended_as(self) -> FinishReason | None:
        """The limit that a last request met."""
        return next((each.ended_as for each in self.sessions.values() if each.ended_as is not None), None)
