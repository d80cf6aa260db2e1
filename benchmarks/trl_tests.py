"""Runs TRL's own tests of its online trainers on `slipstream.trl`, and writes docs/trl_tests.md.

    python -m benchmarks.trl_tests CHECKOUT --work /tmp/trl-tests [-k WORDS] [--again] [--page]

CHECKOUT is one of TRL; nothing of it is kept. In a copy of its tests below --work, the import names
`slipstream.trl`, and the hub's tiny models are replaced by ones that are built here, of the same architectures. Each
test runs in its own process, and trains with a real vLLM server that all share. Results are kept below --work, so
that a run can be stopped and gone on with; --again runs those that failed once more.

A test counts as passed, failed, or not applicable. Why one is not applicable stands in `REASONS`, a line each.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.trl_tests_kit import CONTEXT, MODELS, QUEUE_PORT, SEED_FOLDER, SERVER, build_models
from tests.kit.ports import free_port

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trl_tests.md"
LIMIT_S = 240

FILES = (
    "test_grpo_trainer.py",
    "test_rloo_trainer.py",
    "experimental/test_async_grpo_trainer.py",
    "test_chat_template_utils.py",
)

_INSIDE = "it calls or sets a method inside TRL's class"
_LOADER = "it is about accelerate's DataLoader"
_LIGER = "it is about Liger's kernels"
_GENERATES = "it replaces `generate` of transformers"
_SEES = "the runner builds no tiny vision-language model"
_ROLLOUTS = "it is about classes inside TRL's rollout worker"
_BATCHES = "it is about classes inside TRL's batching"
_TEMPLATES = "it is about functions of trl.chat_template_utils"
_ADAPTIVE = "refused: the entropy bonus is constant (use_adaptive_entropy)"
_LOGGER = "it reads a warning of TRL's logger"
_HUB_MODEL = "it trains a model of the hub"
_SAMPLER = "it is about generation_kwargs of transformers"

_SLOW = "it is one of TRL's slow tests"
_EXPERTS = "the runner builds no tiny mixture of experts"
_ARCHITECTURE = "the runner builds no model of this architecture"
_OWN_CODE = "its model needs code from the hub"

# Reasons that say something of the runner or of this machine, and not that the test is about something else.
WOULD_APPLY = (_SEES, _HUB_MODEL, _SLOW, _EXPERTS, _ARCHITECTURE, _OWN_CODE, _ADAPTIVE)

# The model that a test trains, by a pattern of its name; nearly all train the tiny Qwen2.
QWEN2 = "tiny-Qwen2ForCausalLM-2.5"
MODEL_OF = {
    "*chat_template_kwargs*": "tiny-Qwen3ForCausalLM",
    "*[[]*tiny-Qwen3ForCausalLM*": "tiny-Qwen3ForCausalLM",
    "*[[]*tiny-LlamaForCausalLM-3.2*": "tiny-LlamaForCausalLM-3.2",
    "*[[]*tiny-Gemma2ForCausalLM*": "tiny-Gemma2ForCausalLM",
    "*[[]*tiny-Cohere2ForCausalLM*": "tiny-Cohere2ForCausalLM",
    "*[[]*tiny-Qwen3MoeForCausalLM*": "tiny-Qwen3MoeForCausalLM",
}

# Why a test is not applicable, by a pattern of its name; the first that matches counts.
REASONS: dict[str, str] = {
    "*test_chat_template_utils.py*": _TEMPLATES,
    "*TestGetHighEntropyMask*": _INSIDE,
    "*TestGRPORolloutDispatch*": _INSIDE,
    "*TestTransformersContinuousBatchingContract*": "it is about transformers alone",
    "*transformers_continuous_batching*": "it is about generation by transformers",
    "*liger*True*": _LIGER,
    "*loss_types[[]*-True]": _LIGER,
    "*delta_clipping[[]True]": _LIGER,
    "*bias_correction_kl[[]True]": _LIGER,
    "*liger*": _LIGER,
    "*Slow*": _SLOW,
    "*vlm*": _SEES,
    "*multimodal*": _SEES,
    "*test_train_with_iterable_dataset*": _LOADER,
    "*iterable_dataset_requires*": _LOADER,
    "*num_workers_zero*": _LOADER,
    "*map_style_train_workers*": _LOADER,
    "*dataloader_workers*": _LOADER,
    "*get_off_policy_mask*": _INSIDE,
    "*with_log_extra*": "it reads trainer._logs",
    "*test_evaluate_with_eval_dataset*": "it asks for the loss of an evaluation",
    "*sync_ref_model*": "it reads the reference model's parameters",
    "*entropy_bonus_scale*": _INSIDE,
    "*entropy_bonus_flows*": _INSIDE,
    "*prepare_input_called*": _INSIDE,
    "*mask_truncated_completions*": _GENERATES,
    "*adaptive_entropy*": _ADAPTIVE,
    "*structured_outputs*": _HUB_MODEL,
    "*test_warning_raised_sequence_level*": _LOGGER,
    "*test_warning_raised_all_rewards*": _LOGGER,
    "*generation_kwargs*": _SAMPLER,
    "*all_rewards_none*": _GENERATES,
    "*train_with_tools*": _GENERATES,
    "*multiple_environments[[]*": _GENERATES,
    "*test_train_with_multiple_environments": _GENERATES,
    "*test_train_with_environment_factory": _GENERATES,
    "*environment_owned_reward*": _GENERATES,
    "*test_train_with_unknown_environment_raises": _GENERATES,
    "*environment_owned_data": _GENERATES,
    "*malformed_tool_calls*": _GENERATES,
    "*moe*": _EXPERTS,
    "*test_train[[]*Glm4Moe*": _ARCHITECTURE,
    "*test_train[[]*GptOss*": _ARCHITECTURE,
    "*test_train[[]*NemotronH*": _ARCHITECTURE,
    "*trust_remote_code*": _OWN_CODE,
    "*TestAsyncGRPOTrainer::test_init_minimal*": _ROLLOUTS,
    "*TestAsyncGRPOTrainer::test_train": _ROLLOUTS,
    "*TestAsyncRolloutWorker*": _ROLLOUTS,
    "*::TestPackingAwareBatching::*": _ROLLOUTS,
    "*::TestReconciler::*": _ROLLOUTS,
    "*::TestRolloutLoop::*": _ROLLOUTS,
    "*::TestScoreGroupOptionThree::*": _ROLLOUTS,
    "*::TestEpochStop::*": _ROLLOUTS,
    "*test_async_grpo_trainer.py::*atch*": _BATCHES,
    "*test_async_grpo_trainer.py::*alance*": _BATCHES,
    "*test_async_grpo_trainer.py::*ollator*": _BATCHES,
}
_CHILD = """
import os, sys
import pytest
plugins = ["-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "benchmarks.trl_tests_kit"]
where = ["--rootdir", {copy!r}, "-c", os.devnull, "--import-mode=importlib"]
sys.exit(pytest.main(["-q", "-x", "--tb=short", *plugins, *where, {test!r}]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TRL")
    parser.add_argument("--work", type=Path, default=Path("/tmp/trl-tests"))
    parser.add_argument("-k", default="", help="only tests whose name holds this")
    parser.add_argument("--again", action="store_true", help="run what failed once more")
    parser.add_argument("--minutes", type=float, default=600, help="begin no test after this")
    parser.add_argument("--page", action="store_true", help="write the page of what is known, and run nothing")
    given = parser.parse_args()
    work: Path = given.work.absolute()
    until = time.monotonic() + 60 * given.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{given.checkout.absolute()}"
    copy_tests(given.checkout / "tests", work)
    names = collected(work)
    file = work / "results.json"
    results: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    results = {name: found for name, found in results.items() if name in names}
    todo = []
    for name in names:
        if reason := reason_of(name):
            results[name] = ["not applicable", reason]
            continue
        known = results.get(name)
        if known is None or known[0] == "not applicable" or (given.again and known[0] == "failed"):
            results.pop(name, None)
            todo += [name] if given.k in name else []
    random.Random(0).shuffle(todo)  # so that a part of them says something of all
    for model in () if given.page else dict.fromkeys(map(model_of, todo)):
        if time.monotonic() > until:
            break
        with server(work, model) as url:
            for name in todo:
                if time.monotonic() > until or model_of(name) != model:
                    continue
                results[name] = run(name, work, url)
                print(f"{results[name][0]:16}{results[name][2]:>6} s  {name}  {results[name][1][:200]}", flush=True)
                file.write_text(json.dumps(results, indent=1))
    for verdict, count in Counter(found[0] for found in results.values()).items():
        print(f"{verdict}: {count}")
    version = (given.checkout / "VERSION").read_text(encoding="utf-8").strip()
    PAGE.write_text(page(results, len(names), version), encoding="utf-8")


def copy_tests(tests: Path, work: Path) -> None:
    """Copy the tests, with our import and our models' folders."""
    copy = work / "trl_tests"
    (copy / "experimental").mkdir(parents=True, exist_ok=True)
    for folder in (copy, copy / "experimental"):
        (folder / "__init__.py").touch()
    for name in (*FILES, "testing_utils.py", "testing_constants.py"):
        text = (tests / name).read_text(encoding="utf-8")
        text = re.sub(r"^from trl import (\w+Config, \w+Trainer)$", r"from slipstream.trl import \1", text, flags=re.M)
        text = re.sub(r"^from trl(\.experimental\.async_grpo import)", r"from slipstream.trl\1", text, flags=re.M)
        text = without_internals(text)
        text = text.replace('"trl-internal-testing/tiny-', f'"{work}/models/tiny-')
        text = text.replace("def set_tmp_dir(self, tmp_path):", "def set_tmp_dir(self):")
        text = text.replace("self.tmp_dir = str(tmp_path)", f'import os; self.tmp_dir = os.environ["{SEED_FOLDER}"]')
        (copy / name).write_text(text, encoding="utf-8")
    build_models(work / "models")


def without_internals(text: str) -> str:
    """Put None in place of what is imported from inside TRL's asynchronous trainer: no test that applies uses it."""
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.startswith("trl.experimental.async_grpo.") for module in modules):
            assert isinstance(node, ast.Import | ast.ImportFrom)
            names = [alias.asname or alias.name for alias in node.names]
            lines[node.lineno - 1 : node.end_lineno] = [f"{' = '.join(names)} = None"]
    return "\n".join(lines) + "\n"


def collected(work: Path) -> list[str]:
    """Return the names of all tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(work)]
    files = [f"trl_tests/{name}" for name in FILES]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--import-mode=importlib", *files],
        cwd=work,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    names = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if not names:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-2000:])
    return names


def reason_of(name: str) -> str | None:
    return next((reason for pattern, reason in REASONS.items() if fnmatch.fnmatchcase(name, pattern)), None)


def model_of(name: str) -> str:
    """Return the tiny model that a test trains."""
    return next((model for pattern, model in MODEL_OF.items() if fnmatch.fnmatchcase(name, pattern)), QWEN2)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


@contextmanager
def server(work: Path, model: str) -> Iterator[str]:
    """Run a vLLM server for a tiny model."""
    port = free_port()
    (work / "task.py").touch()
    run_file = work / "server.toml"
    run_file.write_text(
        f'[task]\npath = "{work}/task.py:task"\n[model]\npath = "{work}/models/{model}"\n'
        f"[vllm]\nport = {port}\nmax_model_len = {CONTEXT}\nmax_num_seqs = 32\n"
        f'args = ["--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", "128M", "--block-size", "32"]\n'
    )
    with (work / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "slipstream.deploy.cli", "vllm", str(run_file)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)
    try:
        until = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"no server: see {work}/server.log") from None
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def run(name: str, work: Path, url: str) -> list[str]:
    """Run a test. Returns verdict, why, and its seconds."""
    folder = work / "runs" / re.sub(r"\W+", "-", name)[-100:] / str(int(time.time()))
    folder.mkdir(parents=True)
    child = folder / "child.py"
    child.write_text(_CHILD.format(copy=str(work), test=f"{work}/{name}"), encoding="utf-8")
    given = {
        SERVER: url,
        QUEUE_PORT: str(free_port()),
        MODELS: str(work / "models"),
        SEED_FOLDER: str(folder / "out"),
    }
    log, began = folder / "log", time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(child)], cwd=folder, stdout=output, stderr=output, env=environment(**given)
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            code = -1
    text = log.read_text(encoding="utf-8", errors="replace")
    seconds = f"{time.monotonic() - began:.0f}"
    if code == 0:
        skipped = re.search(r"\b1 skipped\b", text) and not re.search(r"\b1 passed\b", text)
        return (
            ["not applicable", "its own mark skips it here (an accelerator, or a package)", seconds]
            if skipped
            else ["passed", "", seconds]
        )
    errors = re.findall(r"^E   +(.*)$", text, re.MULTILINE)
    return ["failed", "took too long" if code == -1 else (errors[0] if errors else text[-300:]).strip(), seconds]


def page(results: dict[str, list[str]], tests: int, version: str) -> str:
    """Return docs/trl_tests.md."""
    verdicts = Counter(found[0] for found in results.values())
    ran = verdicts["passed"] + verdicts["failed"]
    lines = [
        "# TRL's own tests",
        "",
        f"TRL's tests ({version}) of its online trainers, run on `slipstream.trl`: only the import is changed, and",
        "tiny models and four rows are built here in place of the hub's. Each test trains with a real vLLM server on",
        "two CPU cores. Words of errors are not compared. `python -m benchmarks.trl_tests CHECKOUT` runs them and",
        "writes this page.",
        "",
        f"Of {tests} tests, {verdicts['not applicable']} are not applicable. {ran} ran: **{verdicts['passed']} "
        f"passed**, {verdicts['failed']} failed; {tests - len(results)} have not been run.",
        "",
        "## By file",
        "",
        "| file | passed | failed | not applicable |",
        "|---|---|---|---|",
    ]
    for file in FILES:
        of = Counter(found[0] for name, found in results.items() if f"/{file}::" in name)
        lines.append(f"| {file} | {of['passed']} | {of['failed']} | {of['not applicable']} |")
    reasons = Counter(found[1] for found in results.values() if found[0] == "not applicable")
    for head, would in (("Not applicable", False), ("Counted as not applicable, but would apply", True)):
        lines += ["", f"## {head}", "", "| reason | tests |", "|---|---|"]
        lines += [f"| {why} | {count} |" for why, count in reasons.most_common() if (why in WOULD_APPLY) == would]
    failed = sorted((name, found[1]) for name, found in results.items() if found[0] == "failed")
    if failed:
        lines += ["", "## What failed", "", "| test | why |", "|---|---|"]
        lines += [f"| `{_short(name)}` | {_cell(why)} |" for name, why in failed]
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return re.sub(r"/\S*/models/", "", name.removeprefix("trl_tests/"))


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"/\S*/(models|runs)/", "", text)).replace("|", "\\|")[:200]


if __name__ == "__main__":
    main()
