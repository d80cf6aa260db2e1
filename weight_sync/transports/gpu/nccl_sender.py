"""The learner's place in the group of one server, and collectives beside the HTTP call that has the server take part.

The collective runs on a thread of its own; the call keeps the deadline. Where either fails, the group is aborted at
once, so that the other does not wait for what cannot come (trl#6796, trl#6797).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Coroutine
from typing import Any

from weight_sync.server.cancellation import gather, on_thread
from weight_sync.server.control import ControlError, ServerControl
from weight_sync.transports.base import TransferError
from weight_sync.transports.gpu.communicator import Communicator
from weight_sync.transports.gpu.nccl_library import NcclError
from weight_sync.transports.nccl import streams


class Link:
    """Connected once; after an error or `close` it is of no use."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: Communicator | None = None

    @property
    def group(self) -> Communicator:
        """Raises `TransferError` when not connected."""
        if self._group is None or self._group.ended:
            raise TransferError("the transport is not connected")
        return self._group

    @property
    def connected(self) -> bool:
        return self._group is not None and not self._group.ended

    async def open(
        self, server: ServerControl, workers: int, info: Callable[[streams.Gpu], dict[str, Any]]
    ) -> streams.Gpu:
        """Meet the server's workers: what `info` gives for this end's GPU and the group's secret id go to them.

        The id travels by the server's guarded route: who does not know it cannot join. Raises `TransferError`,
        `ControlError`.
        """
        size = workers + 1
        try:
            gpu = await on_thread(streams.own_gpu)
            unique_id = await on_thread(gpu.library.unique_id)
            self._group = group = Communicator(gpu, self._timeout_s)
        except NcclError as error:
            raise TransferError(str(error)) from error
        named = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "world_size": size,
            **info(gpu),
        }
        await self.beside(server.init_transfer(named), group.meet, unique_id, size, 0)
        return gpu

    async def beside(self, call: Coroutine[Any, Any, None], work: Callable[..., None], *arguments: Any) -> None:
        """`work(*arguments)`, which uses the group, on a thread, while the server answers `call`."""
        group = self._group
        assert group is not None

        async def asked() -> None:
            try:
                await call
            except BaseException:
                group.stop()
                raise

        def worked() -> None:
            try:
                work(*arguments)
            except NcclError as error:
                raise TransferError(f"the transfer broke off: {error}") from error
            except BaseException:
                group.stop()
                raise

        try:
            await gather(asked(), on_thread(worked))
        except (ControlError, TransferError):
            await self.close()
            raise

    async def close(self) -> None:
        """End the group; may be called again."""
        group, self._group = self._group, None
        if group is not None:
            await on_thread(group.abort)
