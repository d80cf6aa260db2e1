"""Adapters on a server's disk: what is damaged, out of order or badly named never becomes an adapter there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from slipstream.protocol.versions import name_of, version_of
from slipstream.weight_sync.vllm.adapter_store import AdapterStore
from slipstream.weight_sync.vllm.engine_state import RouteError
from slipstream.weight_sync.weights.snapshot import adapter_digest

FILE, CONFIG = bytes(range(256)) * 40, '{"r": 8}'
DIGEST = adapter_digest(FILE, CONFIG)
NAME = name_of(7, DIGEST)


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path)


def send(store: AdapterStore, file: bytes = FILE, name: str = NAME, size: int = 4000) -> None:
    for start in range(0, len(file), size):
        chunk = file[start : start + size]
        store.append(name, start, chunk, blake3(chunk).hexdigest())


def test_what_was_sent_in_chunks_lies_there_as_peft_writes_it(store: AdapterStore) -> None:
    send(store)
    folder = store.complete(NAME, CONFIG, DIGEST)
    assert (folder / "adapter_model.safetensors").read_bytes() == FILE
    assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 8}
    assert store.folder.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    assert store.complete(NAME, CONFIG, DIGEST) == folder


def test_a_chunk_that_is_damaged_on_its_way_is_refused_and_can_be_sent_again(store: AdapterStore) -> None:
    store.append(NAME, 0, FILE[:4000], blake3(FILE[:4000]).hexdigest())
    with pytest.raises(RouteError, match="damaged on its way") as refused:
        store.append(NAME, 4000, b"x" + FILE[4001:8000], blake3(FILE[4000:8000]).hexdigest())
    assert refused.value.status == 400
    assert store.append(NAME, 4000, FILE[4000:], blake3(FILE[4000:]).hexdigest()) == len(FILE)
    assert store.complete(NAME, CONFIG, DIGEST).is_dir()


def test_a_file_or_a_configuration_that_is_not_the_names_is_refused(store: AdapterStore) -> None:
    for file, config, digest in (
        (FILE[:-1], CONFIG, DIGEST),
        (FILE, '{"r": 9}', DIGEST),
        (FILE, '{"r": 9}', adapter_digest(FILE, '{"r": 9}')),  # right, and another adapter than the name says
    ):
        send(store, file)
        with pytest.raises(RouteError, match="another digest"):
            store.complete(NAME, config, digest)
    assert list(store.folder.iterdir()) == []


def test_chunks_out_of_order_say_how_much_is_there(store: AdapterStore) -> None:
    with pytest.raises(RouteError, match="0 bytes are there"):
        store.append(NAME, 4000, b"", blake3(b"").hexdigest())
    store.append(NAME, 0, FILE[:10], blake3(FILE[:10]).hexdigest())
    with pytest.raises(RouteError, match="begins at byte 5, and 10 bytes are there") as refused:
        store.append(NAME, 5, FILE[5:10], blake3(FILE[5:10]).hexdigest())
    assert refused.value.status == 409


@pytest.mark.parametrize("name", ["", "policy", "policy-v1", "../x", "policy-v1.0123456789abcdef/..", "policy-v1.XYZ"])
def test_i8_a_name_from_outside_never_becomes_a_path(store: AdapterStore, name: str) -> None:
    assert version_of(name) is None
    with pytest.raises(RouteError, match="not a name of an adapter"):
        store.append(name, 0, b"x", blake3(b"x").hexdigest())
    with pytest.raises(RouteError, match="not a name of an adapter"):
        store.complete(name, CONFIG, DIGEST)


def test_i8_what_arrives_is_bounded(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weight_sync.vllm.adapter_store.MAX_FILE_BYTES", 5000)
    with pytest.raises(RouteError, match="larger than 5000") as refused:
        send(store)
    assert refused.value.status == 413
    for version in range(5):
        store.append(name_of(version, DIGEST), 0, b"x", blake3(b"x").hexdigest())
    assert len(list(store.folder.iterdir())) == 2


def test_only_what_is_kept_stays(store: AdapterStore) -> None:
    names = []
    for version in range(3):
        names.append(name_of(version, DIGEST))
        send(store, name=names[-1])
        store.complete(names[-1], CONFIG, DIGEST)
    assert store.keep(names[1:]) == names[:1]
    assert sorted(folder.name for folder in store.folder.iterdir()) == sorted(names[1:])


def test_folders_of_processes_that_were_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from slipstream.weight_sync.vllm.adapter_store import AdapterStore; "
    )
    code += "AdapterStore(Path(sys.argv[1])); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    [left] = tmp_path.iterdir()
    own = AdapterStore(tmp_path)
    assert not left.exists()
    AdapterStore(tmp_path)
    assert own.folder.exists()
