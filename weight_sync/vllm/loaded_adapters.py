"""Loads adapters into the engine, and keeps which one serves: the newest proven one.

An adapter is loaded under its own name next to those that serve, proven, and only then served: no token is sampled from
unproven weights, and there is no pause. Requests in flight keep their adapter. Its file is not removed while a request
may need it, as vLLM reads it again once its cache has dropped it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from slipstream.protocol.engine import AdapterLoaded, AdapterServed, AdaptersState
from slipstream.protocol.versions import label_in
from slipstream.weight_sync.vllm.adapter_store import AdapterStore
from slipstream.weight_sync.vllm.engine.contract import EngineClient
from slipstream.weight_sync.vllm.engine_state import RouteError, status_of

logger = logging.getLogger(__name__)

# Number of adapters, the last that served, that requests may still name.
KEPT = 3


class LoadedAdapters:
    """The adapters of one engine.

    Attributes:
        served: Name of the newest proven one, None before the first.
    """

    def __init__(self, engine: EngineClient, models: Any, store: AdapterStore) -> None:
        """Prepare to load adapters into an engine.

        Args:
            models: vLLM's `OpenAIServingModels`, which knows adapters by name.
            store: The adapters on disk.
        """
        self.served: str | None = None
        self.store = store
        self.engine = engine
        self._models = models
        self._order: list[str] = []
        self._lock = asyncio.Lock()

    def state(self) -> AdaptersState:
        """Return the answer of `GET /slipstream/adapters`."""
        lora = self.engine.vllm_config.lora_config
        return AdaptersState(
            enabled=lora is not None,
            max_rank=lora.max_lora_rank if lora is not None else 0,
            served=self.served,
            loaded=self._loaded(),
        )

    async def load(self, name: str, config: str, digest: str) -> AdapterLoaded:
        """Load an adapter that has arrived, unless it is loaded.

        Raises:
            RouteError: 422 if vLLM refuses it.
            RouteError: It has not arrived whole.
        """
        async with self._lock:
            if name in self._models.lora_requests:
                return AdapterLoaded(0.0)
            folder = await asyncio.to_thread(self.store.complete, name, config, digest)
            began = time.monotonic()
            wanted = LoadLoRAAdapterRequest(lora_name=name, lora_path=str(folder))
            refusal = _refusal(await self._models.load_lora_adapter(wanted))
            if refusal is not None:
                self.store.keep(set(self.store.whole) - {name})
                raise RouteError(422, f"vLLM does not load the adapter {name}: {refusal}")
            return AdapterLoaded(time.monotonic() - began)

    async def serve(self, name: str) -> AdapterServed:
        """Make `name` the adapter that serves, and unloads old ones. Raises `RouteError` 409 if it is not loaded."""
        async with self._lock:
            if name not in self._models.lora_requests:
                raise RouteError(409, f"the adapter {name} is not loaded")
            self._name(name)
            self._order = [*(other for other in self._order if other != name), name][-KEPT:]
            # Their files are removed by a later call, as a request may be about to enter the engine.
            kept = {*self._order, *self._loaded(), *self._in_use()}
            gone = await asyncio.to_thread(self.store.keep, kept)
            for old in self._loaded():
                if old not in self._order:
                    await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=old))
            return AdapterServed(len(gone))

    async def clear(self) -> None:
        """Unload all adapters before the base changes, as their proofs hold for the old base only."""
        async with self._lock:
            self._name(None)
            self._order = []
            for name in self._loaded():
                await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))

    def adapter(self, name: str) -> Any:
        """Return vLLM's `LoRARequest` of an adapter, None if it is not loaded."""
        return self._models.lora_requests.get(name)

    def _name(self, served: str | None) -> None:
        """Set the adapter that workers are told of, and this server's label."""
        self.served = served
        status_of(self.engine).adapter = None if served is None else str(label_in(served))

    def _loaded(self) -> list[str]:
        """Return the names of Slipstream's adapters; a person may have loaded others."""
        return [name for name in self._models.lora_requests if label_in(name) is not None]

    def _in_use(self) -> set[str]:
        """Return the adapters of the requests in flight."""
        states = self.engine.output_processor.request_states.values()
        return {state.lora_name for state in states if state.lora_name is not None}


def _refusal(answer: Any) -> str | None:
    """Return vLLM's reason for not loading an adapter, None if it has. Its answer is a text or an error object."""
    error = getattr(answer, "error", None)
    return None if error is None else str(error.message)
