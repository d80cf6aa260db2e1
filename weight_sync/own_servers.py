"""`slipstream.servers`: keeps vLLM servers at the newest weights of a trainer that has no queue.

Weights are staged while a server generates, proven, and swapped in within milliseconds, as in a run of Slipstream.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import msgspec
from transformers import AutoConfig

from slipstream.protocol.config import ConfigError, ModelSection, RunConfig, resolve
from slipstream.protocol.messages import Server, ServerState
from slipstream.weight_sync.fleet.eligibility import Wanted
from slipstream.weight_sync.fleet.publications import PublishRecord
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.transports.base import Transport
from slipstream.weight_sync.weights.snapshot import NamedWeights, Probe, Score, pairs, probe_token_ids


class LocalRegistry:
    """A registry of servers that only this process follows."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = {f"vllm-{index}": Server(f"vllm-{index}", url.rstrip("/")) for index, url in enumerate(urls)}

    async def servers(self) -> list[Server]:
        return list(self._servers.values())

    async def put_server(self, server: Server, session: int | None = None) -> Server:
        known = self._servers[server.name]
        held = known.version if server.version is None else server.version
        version = None if server.state is ServerState.JOINING else held
        proof = server.proof or known.proof
        noted = msgspec.structs.replace(server, version=version, proof=proof, changed_at=time.time())
        self._servers[server.name] = noted
        return noted

    async def waiting(self, session: int, what: str | None) -> None: ...


class Servers:
    """The servers of `slipstream.servers`. Use it as a context manager."""

    def __init__(
        self,
        config: RunConfig,
        urls: Sequence[str],
        vocabulary: int,
        make_transport: Callable[[], Transport] | None = None,
    ) -> None:
        self._config, self._vocabulary = config, vocabulary
        registry = LocalRegistry(urls)
        wanted = replace(Wanted.of(config), max_model_len=None, workers=False)
        self._publisher = Publisher(
            config, make_transport=make_transport, registry=lambda: nullcontext(registry), wanted=wanted
        )
        self._publisher.session, self._publisher.run_id = 1, uuid.uuid4().hex
        self._published = 0
        self._newest: int | None = None
        self._open = False

    def __enter__(self) -> Self:
        self._publisher.__enter__()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._publisher.__exit__(kind, error, trace)

    def publish(self, version: int, weights: NamedWeights, score: Score) -> None:
        """Give a version of the weights to the servers, in the background.

        The weights are copied before it returns. A server that is still on an older version when the next one is
        published skips to the newest.

        Args:
            version: Above that of the publication before.
            weights: Names and tensors as in the model's checkpoint, such as `model.named_parameters()`.
            score: Scores a sequence under these weights, see `Score`.

        Raises:
            PublishError: The first version reached no server, or every server failed several times.
            ValueError: The scores are not T - 1 finite numbers, or the version is not above the one before.
            RuntimeError: The `with` block is not entered, or was left.
        """
        self._check_open()
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"version {version} is not above {self._newest}, the one that was published before")
        ids = probe_token_ids(self._vocabulary, self._published, self._config.run.seed)
        self._publisher.publish(version, pairs(weights), Probe.taken(ids, score))
        self._published += 1
        self._newest = version

    def wait(self) -> PublishRecord | None:
        """Wait until the newest version is served: proven on `weight_sync.quorum` servers, or given up.

        Returns:
            The newest publication that counted: seconds of transfer and pause, and the largest difference of a
            log-prob. None where none did.

        Raises:
            PublishError, RuntimeError: As `publish`.
        """
        self._check_open()
        self._publisher.wait()
        return self._publisher.records[-1] if self._publisher.records else None

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the servers are not followed: use them in `with slipstream.servers(...) as fleet:`")


def servers(
    urls: str | Sequence[str],
    *,
    model: str,
    token: str | None = None,
    dtype: str = "float32",
    start_timeout_s: float = 120.0,
    **weight_sync: Any,
) -> Servers:
    """Publish weights to vLLM servers from a trainer of any kind.

        with slipstream.servers(["http://10.0.0.7:8000"], model="Qwen/Qwen3-0.6B") as fleet:
            fleet.publish(1, model.named_parameters(), score)
            fleet.wait()

    Start each server with Slipstream's part in it, as `slipstream vllm` does: docs/own_trainer.md has the flags.

    Args:
        urls: Of the servers.
        model: Path or hub name of the model that they serve.
        token: The servers' token, where they ask for one.
        dtype: Type that the servers compute in.
        start_timeout_s: How long the first publication waits for a server that answers.
        weight_sync: Settings of [weight_sync], such as `transport="http"` or `timeout_s=60.0`.

    Raises:
        ConfigError: A setting is wrong, or the model's configuration cannot be read.
    """
    urls = [urls] if isinstance(urls, str) else list(urls)
    if not urls:
        raise ConfigError("slipstream.servers([]): give the URL of at least one vLLM server")
    given: dict[tuple[str, str], Any] = {
        ("model", "path"): model,
        ("model", "dtype"): dtype,
        ("task", "path"): "none.py:task",
        ("vllm", "servers"): urls,
        ("vllm", "start_timeout_s"): start_timeout_s,
        ("queue", "token"): token,
    }
    given |= {("weight_sync", name): value for name, value in weight_sync.items()}
    config = resolve(None, {key: value for key, value in given.items() if value is not None}, "slipstream.servers")
    return Servers(config, urls, vocabulary_size(config.model))


def vocabulary_size(model: ModelSection) -> int:
    """Return how many token ids the model knows, by its configuration alone. Raises `ConfigError`."""
    try:
        found = AutoConfig.from_pretrained(
            model.path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path = {model.path}: its configuration cannot be read: {error}") from error
    return int(found.get_text_config().vocab_size)
