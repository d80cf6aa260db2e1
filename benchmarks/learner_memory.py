"""Measures the memory that a rank of a sharded learner needs to load a model, to write a checkpoint and to resume.

    python -m benchmarks.learner_memory [--million 200] [--ranks 4] [--whole]

Processes on this machine's CPU hold a model with random weights in float32, and exchange over gloo. --whole measures
the other way, which remains where ranks see different files: each rank loads the whole model before it keeps its part,
and rank 0 gathers checkpoints.

model_bytes: Of the weights in float32.
libraries_bytes: What loading a tiny model takes before: code and buffers of libraries that are used for the first
    time.
beside_bytes: What may come on top of a third of it (`BESIDE_BYTES`): of a file 64 MiB at a time, and what a rank
    gathers to compute, as the model is checked: the embeddings, a layer and the next one.
peak_bytes: By phase and rank, the most memory (VmHWM) less what the process had before the phase.
bound_bytes: By phase: a third of the bytes that all ranks load or hold (`resume` reads three times the weights' bytes:
    AdamW keeps two moments), and `beside_bytes`.
within: Whether each rank's peak is at most that.
seconds: By phase, of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import PartialState
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.ranks.team import Team
from slipstream.learner.run import build_trainer
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import RunConfig
from tests.kit.model import tiny_model

dist: Any = torch.distributed

BESIDE_BYTES = 128 << 20
PARTS_OF_PHASE = {"load": 1, "checkpoint": 1, "resume": 3}
# Weights of a layer of the model below, and of its embeddings.
OF_A_LAYER, OF_EMBEDDINGS = 6.29e6, 6.29e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=200, help="parameters of the model, in millions")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    if arguments.rank:
        number, port, folder = arguments.rank
        measure_rank(int(number), int(port), Path(folder), arguments.ranks, arguments.whole)
        return
    print(json.dumps(measure(arguments.million, arguments.ranks, arguments.whole), indent=2))


def measure(million: float, ranks: int, whole: bool = False) -> dict[str, Any]:
    """Return the figures of the module's docstring, by name. All processes have ended then."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as made:
        folder = Path(made)
        size = _in_a_process(folder, million)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "benchmarks.learner_memory", "--ranks", str(ranks), *["--whole"] * whole]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), str(store.port), str(folder)],
                # Memory that is freed goes back to the system at once, so that it is not counted.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        found = []
        for process in processes:
            output, _ = process.communicate()
            if process.returncode:
                raise SystemExit(f"a rank ended with code {process.returncode}")
            found.append(json.loads(output))
    bounds = {phase: parts * size // 3 + BESIDE_BYTES for phase, parts in PARTS_OF_PHASE.items()}
    peaks = {phase: [of[phase]["peak_bytes"] for of in found] for phase in PARTS_OF_PHASE}
    return {
        "way": "whole" if whole else "by part",
        "ranks": ranks,
        "model_bytes": size,
        "libraries_bytes": max(of["libraries"]["peak_bytes"] for of in found),
        "beside_bytes": BESIDE_BYTES,
        "peak_bytes": peaks,
        "bound_bytes": bounds,
        "within": {phase: max(peaks[phase]) <= bounds[phase] for phase in PARTS_OF_PHASE},
        "seconds": {phase: round(max(of[phase]["seconds"] for of in found), 2) for phase in PARTS_OF_PHASE},
    }


def _in_a_process(folder: Path, million: float) -> int:
    """Write the model; in its own process, whose memory goes with it. Returns the bytes of its weights."""
    child = os.fork()
    if not child:
        try:
            layers = max(1, round((1e6 * million - OF_EMBEDDINGS) / OF_A_LAYER))
            config = Qwen3Config(
                vocab_size=8192,
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=layers,
                num_attention_heads=12,
                num_key_value_heads=4,
                head_dim=64,
                tie_word_embeddings=True,
            )
            Qwen3ForCausalLM(config).save_pretrained(folder / "model")
            (folder / "model" / "tokenizer_config.json").write_text("{}")
            tiny_model().save_pretrained(folder / "small")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return (folder / "model" / "model.safetensors").stat().st_size


def measure_rank(number: int, port: int, folder: Path, ranks: int, whole: bool) -> None:
    """Be one rank: load, remember as after a step, write a checkpoint, forget all of it, and resume. Prints the
    figures."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(ranks), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if whole:
        Team.agree = lambda team, yes: False  # type: ignore[method-assign]
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=number, world_size=ranks)
    PartialState(cpu=True)
    team = Team(number, ranks, store, sharded=True)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "task": {"path": "task.py:task"},
            "learner": {"ranks": ranks, "shard_weights": True},
            "run": {"dir": str(folder)},
        }
    )
    figures: dict[str, dict[str, float]] = {}
    small = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder / "small")})})
    with _phase("libraries", figures):
        build_trainer(small, None, team)
    with _phase("load", figures):
        trainer = build_trainer(config, None, team)
    for parameter in trainer.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimiser.step()
    trainer.optimiser.zero_grad()
    with _phase("checkpoint", figures):
        _save(trainer, config)
    dist.barrier()
    del trainer, parameter
    gc.collect()
    with _phase("resume", figures):
        _resume(config, team)
    team.close()
    dist.destroy_process_group()
    print(json.dumps(figures))


def _save(trainer: PolicyTrainer, config: RunConfig) -> None:
    """Do this rank's part of a checkpoint, as rank 0's commands would ask for."""
    if trainer.team.leads:
        checkpoints.save(config.run_dir, CheckpointInfo(1, 1), trainer, Sources(config.model), keep=1)
    else:
        trainer.save_model(Path())
        trainer.state()


def _resume(config: RunConfig, team: Team) -> PolicyTrainer:
    """Build the trainer again from rank 0's checkpoint."""
    trainer = build_trainer(config, checkpoints.of_step(config.run_dir, 1) if team.leads else None, team)
    if not team.leads:
        trainer.restore({})
    return trainer


@contextmanager
def _phase(name: str, figures: dict[str, dict[str, float]]) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, began = _status("VmRSS"), time.perf_counter()
    yield
    if os.environ.get("DBG"):
        print(
            name,
            _status("VmRSS") >> 20,
            _status("VmHWM") >> 20,
            _status("RssFile") >> 20,
            before >> 20,
            file=sys.stderr,
        )
    seconds = time.perf_counter() - began
    figures[name] = {"peak_bytes": _status("VmHWM") - before, "seconds": seconds}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
