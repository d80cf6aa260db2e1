"""Calls NVIDIA's NCCL by ctypes, as far as a broadcast group needs it, so that a learner needs no vLLM next to it.

Communicators are non-blocking: each call returns at once and its end is asked for. A blocking one cannot be interrupted
when its peer has died; vLLM's wrapper begins no others. `nccl4py` would, but it wants CUDA's Python packages besides
torch.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from slipstream.weight_sync.transports.base import TransferError

UNIQUE_ID_BYTES = 128

# Blocks that a broadcast may use on the GPU: few, so that the sampler's kernels find room next to it. All ranks of a
# group must be given the same: NCCL hangs where they open different numbers of channels.
MAX_BLOCKS = 4
_UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF

# The release whose layout `_Config` has; later ones read it by this number.
_LAYOUT = 21800


class NcclError(TransferError):
    """A call of NCCL failed, or took too long."""


class Kind(IntEnum):
    """ncclDataType_t."""

    UINT8 = 1
    FLOAT32 = 7


class Result(IntEnum):
    """The values of ncclResult_t that are told apart here."""

    SUCCESS = 0
    IN_PROGRESS = 7


class Library(Protocol):
    """The part of NCCL that a `Communicator` needs. `group` is a handle from `begin`; addresses are of device memory.

    All but `unique_id` and `abort` return before they are done: `result` tells when they are, or raises `NcclError`.
    """

    def unique_id(self) -> bytes: ...

    def begin(self, unique_id: bytes, size: int, rank: int, max_blocks: int | None) -> Any: ...

    def result(self, group: Any) -> Result: ...

    def broadcast(self, group: Any, address: int, count: int, stream: int) -> None:
        """Copy `count` bytes of rank 0 to all others, in place."""

    def sum_one(self, group: Any, address: int, stream: int) -> None:
        """Sum one float32 over all ranks in place, with which vLLM's workers begin."""

    def abort(self, group: Any) -> None:
        """End the group whatever it does, from any thread. The running call of this rank ends with an error."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_COLLECTIVE = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    ctypes.c_void_p,
)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)),
    ),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclBroadcast": _COLLECTIVE,
    "ncclAllReduce": _COLLECTIVE,
    "ncclCommAbort": (ctypes.c_void_p,),
}


class Nccl:
    """NCCL itself, a `Library`. Raises `NcclError` if it is not installed."""

    def __init__(self) -> None:
        self._calls = _loaded()
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._calls, name)
            function.restype, function.argtypes = ctypes.c_int, arguments
        self._calls.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        made = _UniqueId()
        self._check("ncclGetUniqueId", self._calls.ncclGetUniqueId(ctypes.byref(made)))
        return ctypes.string_at(ctypes.byref(made), UNIQUE_ID_BYTES)

    def begin(self, unique_id: bytes, size: int, rank: int, max_blocks: int | None) -> ctypes.c_void_p:
        named = _UniqueId.from_buffer_copy(unique_id)
        blocks = _UNSET if max_blocks is None else max_blocks
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _LAYOUT, 0, _UNSET, _UNSET, blocks, None, _UNSET)
        group = ctypes.c_void_p()
        code = self._calls.ncclCommInitRankConfig(ctypes.byref(group), size, named, rank, ctypes.byref(config))
        self._check("ncclCommInitRankConfig", code)
        return group

    def result(self, group: ctypes.c_void_p) -> Result:
        code = ctypes.c_int()
        self._check("ncclCommGetAsyncError", self._calls.ncclCommGetAsyncError(group, ctypes.byref(code)))
        self._check("NCCL", code.value)
        return Result(code.value)

    def broadcast(self, group: ctypes.c_void_p, address: int, count: int, stream: int) -> None:
        code = self._calls.ncclBroadcast(address, address, count, Kind.UINT8, 0, group, stream)
        self._check("ncclBroadcast", code)

    def sum_one(self, group: ctypes.c_void_p, address: int, stream: int) -> None:
        code = self._calls.ncclAllReduce(address, address, 1, Kind.FLOAT32, 0, group, stream)
        self._check("ncclAllReduce", code)

    def abort(self, group: ctypes.c_void_p) -> None:
        self._calls.ncclCommAbort(group)  # its result does not matter, as the group is broken anyway

    def _check(self, what: str, code: int) -> None:
        if code not in (Result.SUCCESS, Result.IN_PROGRESS):
            text = self._calls.ncclGetErrorString(code).decode(errors="replace")
            raise NcclError(f"{what}: {text} (code {code}; NCCL_DEBUG=WARN shows more)")


def _loaded() -> ctypes.CDLL:
    tried = []
    for path in _places():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path} ({error})")
    raise NcclError(
        f"NCCL is not to be found: {'; '.join(tried)}; install torch for CUDA, which brings it along, or name the file "
        f"in VLLM_NCCL_SO_PATH"
    )


def _places() -> list[str]:
    """Return where vLLM and torch look for it, as both ends should use one release."""
    named = [os.environ["VLLM_NCCL_SO_PATH"]] if os.environ.get("VLLM_NCCL_SO_PATH") else []
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [*named, *(str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders), "libnccl.so.2"]
