"""Model cards, and uploads that hold nobody: against a stand-in for the hub."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from rich.console import Console

from slipstream.learner.checkpoints import model_card, uploads
from slipstream.learner.checkpoints.model_card import PAPERS, Results, bibtex, sources
from slipstream.learner.checkpoints.upload_process import Request, SendError
from slipstream.learner.checkpoints.uploads import Models, Uploads, require
from slipstream.learner.report.progress import TerminalProgress
from slipstream.protocol.config import ConfigError, HubSection, LearnerSection
from slipstream.protocol.config.sections.presets import ABOUT, PRESETS
from tests.kit import LEARNER, config
from tests.kit.hub import config_in, model_of
from tests.kit.learner import FakeQueue, endless
from tests.learner.test_loop import config_for, train


class FakeHub:
    """Keeps what is sent, by step; waits for `answers`, and fails where `fails` says."""

    def __init__(self) -> None:
        self.repos: list[Any] = []
        self.sent: dict[str, dict[str, bytes]] = {}
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.fails: Exception | None = None
        self.killed = False

    def send(self, request: Request) -> str:
        self.asked.set()
        self.answers.wait(30)
        if self.fails is not None:
            raise self.fails
        self.repos.append((request.repo, request.private))
        self.sent[request.message] = {path.name: path.read_bytes() for path in Path(request.folder).iterdir()}
        return f"me/{request.repo}"

    def kill(self) -> None:
        self.killed = True
        self.fails = SendError("killed")
        self.answers.set()


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def sender(hub: FakeHub, told: list[str], tmp_path: Path) -> Uploads:
    settings = config_in(tmp_path, hub_private_repo=True)
    return Uploads(settings, told.append, told.append, hub)


def test_a_model_goes_to_the_hub_whole(sender: Uploads, hub: FakeHub, told: list[str], tmp_path: Path) -> None:
    sender.push(model_of(tmp_path, 2), 2)
    sender.wait(30)
    assert hub.repos == [("sums", True)]
    assert hub.sent == {"step 2": {"weights": b"of 2"}}
    assert told == ["the model of step 2 is on the hub: me/sums"]
    assert not list((tmp_path / "sums" / ".hub").iterdir())


def test_while_one_is_on_its_way_only_the_newest_waits_and_none_needs_its_checkpoint(
    sender: Uploads, hub: FakeHub, tmp_path: Path
) -> None:
    hub.answers.clear()
    sender.push(first := model_of(tmp_path, 1), 1)
    assert hub.asked.wait(30)
    sender.push(model_of(tmp_path, 2), 2)
    sender.push(model_of(tmp_path, 3), 3)
    for path in (first / "weights", first):
        path.unlink() if path.is_file() else path.rmdir()
    hub.answers.set()
    sender.wait(30)
    assert hub.sent == {"step 1": {"weights": b"of 1"}, "step 3": {"weights": b"of 3"}}


def test_a_hub_that_fails_is_told_and_the_next_is_tried(
    sender: Uploads, hub: FakeHub, told: list[str], tmp_path: Path
) -> None:
    hub.fails = SendError("OSError: 401 Client Error")
    sender.push(model_of(tmp_path, 1), 1)
    sender.wait(30)
    assert told == [
        "the model of step 1 is not on the hub: OSError: 401 Client Error; the run continues, and the checkpoint is in "
        "the run directory"
    ]
    hub.fails = None
    sender.push(model_of(tmp_path, 2), 2)
    sender.wait(30)
    assert list(hub.sent) == ["step 2"]
    assert sender.failed == 1


def test_a_hub_that_hangs_is_not_waited_for_for_ever(
    sender: Uploads, hub: FakeHub, told: list[str], tmp_path: Path
) -> None:
    hub.answers.clear()
    sender.push(model_of(tmp_path, 1), 1)
    assert hub.asked.wait(30)
    sender.wait(0.01)
    assert told == [
        "the upload to the hub did not end within hub.hub_timeout_s = 0.01 s; send the newest checkpoint's model "
        "folder with: hf upload"
    ]
    assert hub.killed


def test_a_model_that_cannot_be_staged_is_told(sender: Uploads, told: list[str], tmp_path: Path) -> None:
    sender.push(tmp_path / "gone", 1)
    assert "the model of step 1 cannot be prepared for the hub" in told[0]
    assert not sender.pending


def test_without_hard_links_files_are_copied(
    sender: Uploads, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(uploads.os, "link", none)
    sender.push(model_of(tmp_path, 1), 1)
    sender.wait(30)
    assert hub.sent == {"step 1": {"weights": b"of 1"}}


@pytest.mark.parametrize(("strategy", "steps"), [("every_save", ["step 2", "step 4"]), ("end", ["step 4"])])
def test_a_run_sends_its_checkpoints_with_their_cards(
    strategy: str, steps: list[str], model_path: Path, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "Child", lambda: hub)
    settings = config_for(model_path, tmp_path)
    settings = settings.model_copy(
        update={"hub": HubSection.model_validate({"push_to_hub": True, "hub_strategy": strategy})}
    )
    patient = Uploads.push

    def push_and_wait(self: Uploads, model: Path, step: int) -> None:
        patient(self, model, step)
        self.wait(30)

    monkeypatch.setattr(Uploads, "push", push_and_wait)
    train(settings, FakeQueue(endless()))
    assert list(hub.sent) == steps
    sent = hub.sent["step 4"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(sent)
    assert b"trained for 4 steps" in sent["README.md"]


def test_every_checkpoint_has_a_card_though_nothing_is_sent(model_path: Path, tmp_path: Path) -> None:
    train(config_for(model_path, tmp_path, steps=2), FakeQueue(endless()))
    read = ModelCard.load(tmp_path / "test" / "checkpoints" / "step-000002" / "model" / "README.md")
    assert read.data.tags == ["slipstream", "reinforcement-learning", "grpo"]
    assert "| first 2 steps | 0.5 |" in read.text


def test_a_card_says_how_the_model_came_about() -> None:
    settings = config(
        LEARNER,
        model={"path": "Qwen/Qwen3-0.6B"},
        run={"name": "sums"},
        learner={"clip_high": 0.4, "learning_rate": 2e-6},
    )
    made = model_card.render_model_card(settings, Results(20, [0.25] * 10 + [0.75] * 10, [(10, 0.5), (20, 0.625)]))
    assert made.data.base_model == "Qwen/Qwen3-0.6B"
    assert made.data.library_name == "transformers"
    for part in (
        "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B), trained for 20 steps",
        "`grpo`, but with `clip_high = 0.4`",
        "[arXiv:2402.03300](https://arxiv.org/abs/2402.03300)",
        "tokens were at most 4 policy versions old",
        "| first 10 steps | 0.25 |",
        "| last 10 steps | 0.75 |",
        "| evaluation of step 20 | 0.625 |",
        "| `learner.learning_rate` | `2e-06` |",
        "- torch ",
        "eprint = {2402.03300}",
    ):
        assert part in made.text, part


def test_a_local_base_model_is_no_name_on_the_hub(tmp_path: Path) -> None:
    made = model_card.render_model_card(config(LEARNER, model={"path": str(tmp_path)}), Results(1, []))
    assert made.data.base_model is None
    assert f"The local model `{tmp_path.name}`, trained for 1 steps" in made.text
    assert str(tmp_path) not in made.text, "paths of this machine are nobody's business"


@pytest.mark.parametrize("algorithm", PRESETS)
def test_papers_of_a_preset_are_linked_and_those_that_are_known_are_cited(algorithm: str) -> None:
    learner = LearnerSection.model_validate({"algorithm": algorithm})
    numbers = re.findall(r"arXiv:([\d.]+\d)", ABOUT[algorithm].source)
    assert all(f"(https://arxiv.org/abs/{number})" in sources(learner) for number in numbers)
    cited = bibtex(learner)
    assert all(f"eprint = {{{number}}}" in cited for number in numbers if number in PAPERS)
    assert cited.count("{") == cited.count("}")


def test_a_card_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    models = Models(config_in(tmp_path, push_to_hub=False), TerminalProgress(2, console=console))
    for step in (1, 2):
        models.saved(tmp_path / "gone", Results(step, []))
    assert cast(io.StringIO, console.file).getvalue().count("README.md cannot be written") == 1


def test_without_a_token_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"hub.push_to_hub = true: there is no token .*set HF_TOKEN"):
        require(HubSection(push_to_hub=True))
    require(HubSection())
    monkeypatch.setattr(uploads, "get_token", lambda: "hf_x")
    require(HubSection(push_to_hub=True))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids it"):
        require(HubSection(push_to_hub=True))
