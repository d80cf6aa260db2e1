"""Our calls of NCCL against vLLM's, whose workers are the other ranks, and against NCCL's header.

The header is the installed package's, or the file that `NCCL_HEADER` names.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slipstream.weight_sync.transports.gpu import nccl_library
from slipstream.weight_sync.transports.gpu.nccl_library import Kind, Result

WRAPPER = "distributed/device_communicators/pynccl_wrapper.py"
VLLM = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]
SOURCES = [VLLM, *map(Path, filter(None, os.environ.get("VLLM_SOURCES", "").split(os.pathsep)))]


def header() -> str:
    given = os.environ.get("NCCL_HEADER")
    spec = find_spec("nvidia") and find_spec("nvidia.nccl")
    folders = spec.submodule_search_locations if spec else None
    for file in [given, *(f"{folder}/include/nccl.h" for folder in folders or ())]:
        if file and Path(file).is_file():
            return Path(file).read_text()
    pytest.skip("NCCL is not installed; NCCL_HEADER may name its nccl.h")


def width(kind: Any) -> tuple[int, bool]:
    """Size in bytes of an argument, and whether it is a pointer: all that a call depends on."""
    is_pointer = kind in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(kind, "contents")
    return ctypes.sizeof(kind), is_pointer


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_calls_have_the_arguments_of_vllms(source: Path) -> None:
    faults = differing((source / WRAPPER).read_text())
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"ncclBroadcast"', '"ncclBcast"', "vLLM has no ncclBroadcast"),
        ("ncclUint8 = 1", "ncclUint8 = 2", "ncclUint8 is 2"),
        ("c_byte * 128", "c_byte * 256", "ncclUniqueId has 256 bytes"),
        ("ncclDataType_t = ctypes.c_int", "ncclDataType_t = ctypes.c_int64", "ncclBroadcast takes"),
    ],
)
def test_a_call_that_vllm_changes_is_found(old: str, new: str, named: str) -> None:
    text = (VLLM / WRAPPER).read_text()
    assert old in text
    found = differing(text.replace(old, new))
    assert any(named in fault for fault in found), found


def differing(wrapper: str) -> list[str]:
    """How our calls differ from those of vLLM's wrapper."""
    tree = ast.parse(wrapper)
    names: dict[str, Any] = {"ctypes": ctypes}
    faults, functions = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("ctypes.c_"):
            names[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), names)  # a type of ctypes
        if isinstance(node, ast.ClassDef) and node.name == "ncclUniqueId":
            size = re.search(r"c_byte \* (\d+)", ast.unparse(node))
            assert size is not None
            names["ncclUniqueId"] = type(
                "UniqueId", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_byte * int(size[1]))]}
            )
            if int(size[1]) != nccl_library.UNIQUE_ID_BYTES:
                faults.append(f"ncclUniqueId has {size[1]} bytes")
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("ncclUint8", "ncclFloat32"):
            name, value = ast.unparse(node.targets[0]), ast.literal_eval(node.value)
            if value != Kind[name.removeprefix("nccl").upper()]:
                faults.append(f"{name} is {value}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Function":
            functions[ast.literal_eval(node.args[0])] = node.args[2]
    for name, ours in nccl_library._SIGNATURES.items():
        if name in ("ncclCommInitRankConfig", "ncclCommGetAsyncError"):
            continue  # vLLM blocks instead
        if name not in functions:
            faults.append(f"vLLM has no {name}")
            continue
        theirs = eval(ast.unparse(functions[name]), names)
        if [width(kind) for kind in ours] != [width(kind) for kind in theirs]:
            faults.append(f"{name} takes {ast.unparse(functions[name])}")
    return faults


def test_the_config_is_the_beginning_of_the_headers() -> None:
    """NCCL adds fields at the end, and reads by `size` and `version` how many there are."""
    text = header()
    struct = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", text, re.S)
    assert struct is not None
    lines = [line.strip() for line in re.sub(r"/\*.*?\*/", "", struct[1], flags=re.S).split(";")]
    kinds = {
        "size_t": ctypes.c_size_t,
        "unsigned int": ctypes.c_uint,
        "int": ctypes.c_int,
        "const char *": ctypes.c_char_p,
    }
    theirs = [(line.rpartition(" ")[2].lstrip("*"), line) for line in lines if line]
    for (ours, kind), (name, line) in zip(nccl_library._Config._fields_, theirs, strict=False):
        declared = line.removesuffix(name).strip()
        assert (ours.replace("_", ""), kind) == (name.lower(), kinds[declared])
    assert re.search(rf"NCCL_UNIQUE_ID_BYTES {nccl_library.UNIQUE_ID_BYTES}\b", text)
    assert re.search(r"NCCL_CONFIG_UNDEF_INT INT_MIN\b", text)
    assert re.search(rf"ncclUint8\s*= {Kind.UINT8},", text)
    assert re.search(rf"ncclFloat32\s*= {Kind.FLOAT32},", text)
    assert re.search(rf"ncclInProgress\s*=\s*{Result.IN_PROGRESS},", text)
    assert -(2 ** (8 * ctypes.sizeof(ctypes.c_int) - 1)) == nccl_library._UNSET


def test_every_call_is_declared_in_the_header_with_as_many_arguments() -> None:
    text = header()
    for name, ours in nccl_library._SIGNATURES.items():
        declared = re.search(rf"ncclResult_t\s+{name}\((.*?)\);", text, re.S)
        assert declared is not None, name
        pointers = ["*" in part or "Comm_t" in part or "Stream_t" in part for part in declared[1].split(",")]
        assert pointers == [width(kind)[1] for kind in ours], name
