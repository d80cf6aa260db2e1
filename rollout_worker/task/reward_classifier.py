"""Computes a reward with a one-label classifier on a vLLM pooling server: `POST /classify`.

Invariant: as in TRL, the classifier reads prompt and completion with its own chat template and tokenizer, and the
reward is its logit. Each conversation is one request, because the route takes only one. Texts are sent in batches.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.task.reward_base import RewardBatch, RewardError, Values

if TYPE_CHECKING:
    import aiohttp

ROUTE = "/classify"

# Maximum number of requests at once for one group.
REQUESTS = 16

# Maximum number of texts in one request.
TEXTS = 32

_MESSAGE_CHARACTERS = 500


def how_to_serve(classifier: str) -> str:
    """Return the remedy for a classifier that has no server."""
    return (
        f"serve it with: slipstream serve {classifier} --runner pooling --port 8300, and name that in the run file: "
        f'[task] reward_servers = {{"{classifier}" = "http://127.0.0.1:8300"}}'
    )


class _Item(msgspec.Struct):
    index: int
    probs: list[float]


class _Reply(msgspec.Struct):
    data: list[_Item]


class ClassifierReward:
    """Computes the reward of a classifier.

    Args:
        classifier: Name of the model on its server.
        servers: URL of each classifier's server, by the classifier's name. None if no server will be asked.

    Raises:
        ConfigError: `servers` has no entry for the classifier.
    """

    def __init__(self, classifier: str, servers: Mapping[str, str] | None) -> None:
        self.name = classifier.rstrip("/").split("/")[-1]
        self._classifier = classifier
        self._url = ""
        if servers is None:
            return
        if classifier not in servers:
            raise ConfigError(
                f"Task(rewards=[{classifier!r}]): it names a classifier, and no server is named for it; "
                f"{how_to_serve(classifier)}"
            )
        self._url = servers[classifier]

    def check_row(self, row: Mapping[str, Any], besides: Collection[str] = ()) -> None:
        """Accept any row, because a classifier reads only prompt and completion."""

    async def check_score(self, row: Mapping[str, Any], timeout_s: float) -> None:
        """Raise `ConfigError` if the server returns no reward."""
        try:
            await self.values(RewardBatch.made_up(row, 1), timeout_s)
        except RewardError as error:
            raise ConfigError(f'task.reward_servers = {{"{self._classifier}" = "{self._url}"}}: {error}') from None

    async def values(self, batch: RewardBatch, timeout_s: float) -> Values:
        """Score the completions of a group.

        Args:
            batch: The prompt and its `G` completions.
            timeout_s: Seconds for all requests together.

        Returns:
            `G` logits, one per completion.

        Raises:
            RewardError: The server gave no usable answer. It is not retryable if the server answered with a 4xx.
        """
        # Imported here, because it takes a quarter of the time in which a child process that runs a tool starts.
        import aiohttp

        if not self._url:
            raise RuntimeError(f"the reward {self._classifier} was made without its server")
        try:
            bodies = _bodies(self._classifier, batch)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            text = f"{self.name}: the conversation cannot be sent: {type(error).__name__}: {error}"
            raise RewardError(self.name, text, "conversation", None) from error
        try:
            # aiohttp has no time-out here, because the reward's own covers all of its requests.
            no_timeout = aiohttp.ClientTimeout(total=None)
            async with asyncio.timeout(timeout_s), aiohttp.ClientSession(timeout=no_timeout) as session:
                logits = await self._ask_all(session, bodies)
        except TimeoutError:
            text = f"{self.name}: no answer from {self._url} within {timeout_s:.3g} s; look at the server's log"
            raise RewardError(self.name, text, reasons.TIMEOUT, None) from None
        except (aiohttp.ClientError, OSError) as error:
            text = f"{self.name}: {self._url}: {type(error).__name__}: {error}; {self._start()}"
            raise RewardError(self.name, text, type(error).__name__, None, retryable=True) from error
        if len(logits) != len(batch.completions):
            text = f"{self.name}: {self._url} gave {len(logits)} scores for {len(batch.completions)} completions"
            raise RewardError(self.name, text, "wrong number", None)
        return Values(logits)

    async def _ask_all(self, session: aiohttp.ClientSession, bodies: Sequence[bytes]) -> list[float | None]:
        free = asyncio.Semaphore(REQUESTS)
        try:
            async with asyncio.TaskGroup() as tasks:
                runs = [tasks.create_task(self._ask(session, free, body)) for body in bodies]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [logit for run in runs for logit in run.result()]

    async def _ask(self, session: aiohttp.ClientSession, free: asyncio.Semaphore, body: bytes) -> list[float]:
        headers = {"Content-Type": "application/json"}
        async with free, session.post(self._url + ROUTE, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                message = answer[:_MESSAGE_CHARACTERS].decode("utf-8", "replace")
                text = f"{self.name}: {self._url}{ROUTE} answers {response.status}: {message}"
                if response.status == 404:
                    known_as = f"knows the model by another name (see {self._url}/v1/models)"
                    text = f"{text}; it is not a pooling server, or {known_as}; {self._start()}"
                raise RewardError(self.name, text, f"HTTP {response.status}", None, retryable=response.status >= 500)
        return self._logits(answer)

    def _start(self) -> str:
        port = urlsplit(self._url).port
        return f"start it with: slipstream serve {self._classifier} --runner pooling" + (
            f" --port {port}" if port else ""
        )

    def _logits(self, answer: bytes) -> list[float]:
        try:
            items = sorted(msgspec.json.decode(answer, type=_Reply).data, key=lambda item: item.index)
        except (msgspec.DecodeError, RecursionError) as error:
            text = f"{self.name}: the answer of {self._url}{ROUTE} does not look like vLLM's: {error}"
            raise RewardError(self.name, text, "unreadable", None) from None
        for item in items:
            if len(item.probs) != 1:
                text = (
                    f"{self.name} gives {len(item.probs)} scores for a completion, and a reward is one: take a "
                    f"classifier with one label (num_labels = 1), or score with a function"
                )
                raise RewardError(self.name, text, "labels", None)
            if not math.isfinite(item.probs[0]):
                raise RewardError(self.name, f"{self.name} gives {item.probs[0]}", "not finite", None)
        return [item.probs[0] for item in items]


def _bodies(classifier: str, batch: RewardBatch) -> list[bytes]:
    """Encode the requests for a group. `use_activation` is false to get the logit itself, and not its sigmoid."""
    head = {"model": classifier, "use_activation": False, "add_special_tokens": False}
    if isinstance(batch.prompt, str):
        texts = [batch.prompt + completion for completion in batch.completions]
        return [_json({**head, "input": texts[start : start + TEXTS]}) for start in range(0, len(texts), TEXTS)]
    return [
        _json({**head, "messages": list(_on_the_wire([*prompt, *completion]))})
        for prompt, completion in zip(batch.arguments()["prompts"], batch.completions, strict=True)
    ]


def _on_the_wire(messages: Iterable[Message]) -> Iterable[Message]:
    """Convert messages to the OpenAI API's form: tool calls have an id, and their arguments are JSON text."""
    for message in messages:
        if not message.get("tool_calls"):
            yield message
            continue
        calls = [
            {
                "id": call.get("id") or f"call_{number}",
                "type": "function",
                "function": {**call["function"], "arguments": _text(call["function"].get("arguments"))},
            }
            for number, call in enumerate(message["tool_calls"])
        ]
        yield {**message, "tool_calls": calls}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _encoder.encode(arguments or {})


def _json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8. A policy may sample a lone surrogate, which becomes a question mark."""
    return _encoder.encode(value).encode("utf-8", "replace")


_encoder = json.JSONEncoder(ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
