"""The shares of all ranks together are what one rank publishes, bit for bit; what a rank holds and sends is counted."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from transformers.core_model_loading import Chunk, WeightConverter

from slipstream.learner.model.adapter import Adapter
from slipstream.learner.model.export import Published
from slipstream.learner.model.share import Share, deal_out
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team
from slipstream.learner.run import build_trainer
from slipstream.protocol.config import LoraSection, ModelSection
from slipstream.weight_sync.weights.snapshot import MadeOneByOne
from tests.kit import LEARNER, config
from tests.kit.copies import start_function
from tests.kit.memory import LiveBytes
from tests.kit.model import save_tiny_model, tiny_model
from tests.learner.families import MIXTURES, TEXT

dist: Any = torch.distributed

SERVED = torch.bfloat16
# Bytes of the largest unit of the kit's tiny model.
MLP = 3 * 32 * 48 * SERVED.itemsize
FAMILIES = {**TEXT, **MIXTURES}
# Rows that no number of ranks divides, norms with fewer elements than ranks, and a bucket of less than a row.
CASES = [
    *((name, 4, 600) for name in FAMILIES),
    ("odd", 3, 600),
    ("odd", 4, 1),
    ("odd", 2, 1 << 20),
    ("tied", 4, 600),
    ("counted", 3, 600),
    ("deep", 4, 600),
]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    match name:
        case "odd":
            return tiny_model(hidden_size=2, head_dim=2, intermediate_size=7, vocab_size=13)
        case "tied":
            return tiny_model(tie_word_embeddings=True)
        case "deep":
            return tiny_model(num_hidden_layers=8)
        case "counted":  # a buffer that a checkpoint holds
            model = tiny_model()
            model.model.layers[1].register_buffer("steps", torch.arange(5))
            return model
        case _:
            return FAMILIES[name]()


def whole(name: str) -> dict[str, torch.Tensor]:
    """What one rank publishes, in the servers' type."""
    return {
        name: tensor.to(SERVED) if tensor.is_floating_point() else tensor for name, tensor in Published(model_of(name))
    }


def published(number: int, name: str, ranks: int, bucket: int) -> dict[str, Any]:
    """A rank's share; the most that it held next to the model while nobody kept anything; what it sent at once."""
    model = wrapping.sharded(model_of(name), torch.device("cpu"))
    team = Team(number, ranks, sharded=True)
    share = Share(model, team, SERVED, bucket)
    assert isinstance(share, MadeOneByOne)
    layout = {name: (of.shape, of.dtype) for name, of in share.layout().items()}
    found = {name: tensor.clone() for name, tensor in share}
    assert list(layout.items()) == [(name, (of.shape, of.dtype)) for name, of in found.items()]

    sent: list[int] = []
    exchange = wrapping.exchange

    def counted(outgoing: Any, incoming: Any) -> None:
        sent.append(sum(tensor.nbytes for _, tensor in outgoing))
        exchange(outgoing, incoming)

    wrapping.exchange = counted
    try:
        with LiveBytes() as live:
            for _ in share:
                pass
    finally:
        wrapping.exchange = exchange
    return {"share": found, "held": live.peak, "sent": sent}


def rank(number: int, ranks: int, store: str, pipe: int) -> None:
    answers = Connection(pipe)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
    for case in CASES:
        if case[1] != ranks:
            continue
        try:
            found: Any = published(number, case[0], ranks, case[2])
        except Exception:
            found = traceback.format_exc()
        answers.send_bytes(bytes(ForkingPickler.dumps((case, number, as_lists(found)))))
    dist.destroy_process_group()


def as_lists(found: Any) -> Any:
    """Without memory that another process would have to map."""
    if isinstance(found, dict):
        shares = {name: (str(of.dtype), of.double().tolist()) for name, of in found["share"].items()}
        return {**found, "share": shares}
    return found


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[int, Any]]:
    found: dict[Any, dict[int, Any]] = {case: {} for case in CASES}
    for ranks in {case[1] for case in CASES}:
        store = str(tmp_path_factory.mktemp("store") / "store")
        pipes, processes = [], []
        for number in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            processes.append(
                start_function(["slipstream.learner.run"], rank, number, ranks, store, pipes=[theirs.fileno()])
            )
            pipes.append(ours)
            theirs.close()
        try:
            for _ in (case for case in CASES if case[1] == ranks):
                for pipe in pipes:
                    assert pipe.poll(240), "a rank does not answer"
                    case, number, answer = pipe.recv()
                    found[case][number] = answer
        finally:
            for process in processes:
                process.kill()
    return found


def ids(case: tuple[str, int, int]) -> str:
    return f"{case[0]}-{case[1]}-{case[2]}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_all_shares_are_what_one_rank_publishes(shares: Any, case: tuple[str, int, int]) -> None:
    parts = shares[case]
    assert all(isinstance(part, dict) for part in parts.values()), parts
    right = {name: (str(of.dtype), of.double().tolist()) for name, of in whole(case[0]).items()}
    assert sum(len(part["share"]) for part in parts.values()) == len(right)
    assert {name: of for part in parts.values() for name, of in part["share"].items()} == right


def test_a_rank_holds_one_unit_and_one_bucket_and_sends_each_row_once(shares: Any) -> None:
    """Counted while the consumer keeps nothing but the tensor before."""
    case = ("deep", 4, 600)
    total = sum(of.nbytes for of in whole("deep").values())
    for part in shares[case].values():
        assert max(part["sent"]) <= 600
        assert part["held"] <= MLP + MLP // 3 + 600
        assert part["held"] < total / 4 / 2, "it would not show otherwise"
    sent = sum(sum(part["sent"]) for part in shares[case].values())
    assert sent == pytest.approx(total * 3 / 4, rel=0.01)


def test_experts_in_one_tensor_are_held_twice_at_most(shares: Any) -> None:
    for part in shares["Qwen3-MoE", 4, 600].values():
        experts = 4 * 3 * 16 * 32 * SERVED.itemsize
        assert part["held"] <= 2 * experts + 3 * 4 * 16 * 2 * 32 * SERVED.itemsize


@given(sizes=st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=40), count=st.integers(1, 9))
def test_the_deal_gives_each_unit_to_one_rank_and_none_much_more_than_the_mean(
    sizes: dict[str, int], count: int
) -> None:
    shares = deal_out(sizes, count)
    assert len(shares) == count
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    totals = [sum(sizes[name] for name in share) for share in shares]
    assert max(totals) <= sum(totals) / count + max(sizes.values(), default=0)
    for share, total in zip(shares, totals, strict=True):
        assert total - min((sizes[name] for name in share), default=0) <= min(totals)
    assert shares == deal_out(dict(reversed(sizes.items())), count)


def union(shares: Iterable[Share]) -> dict[str, torch.Tensor]:
    """The shares together; a name must be in one of them only."""
    found: dict[str, torch.Tensor] = {}
    for share in shares:
        tensors = dict(share)
        assert list(tensors) == list(share.layout())
        assert not set(tensors) & set(found)
        found |= tensors
    return found


def same(found: dict[str, torch.Tensor], right: Iterable[tuple[str, torch.Tensor]]) -> None:
    expected = {name: tensor.to(SERVED) for name, tensor in right}
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_hold_all_weights_share_them_as_they_are_after_each_step(ranks: int) -> None:
    model = model_of("Mixtral")
    shares = [Share(model, Team(number, ranks), SERVED) for number in range(ranks)]
    for _ in range(2):
        same(union(shares), Published(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = 2 * parameter.data


def test_an_adapter_is_merged_by_the_rank_whose_matrix_it_is() -> None:
    model = tiny_model()
    adapter = Adapter(model, LoraSection(r=4), ModelSection(path="None"), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    shares = [Share(model, Team(number, 3), SERVED, view=adapter.published) for number in range(3)]
    assert all(share.layout() for share in shares)
    same(union(shares), Published(model, adapter.published()))


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("norms.weight", ["input_layernorm.weight", "post_attention_layernorm.weight"]),
        ("model.norms", ["model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"]),
    ],
    ids=["within a layer", "over layers"],
)
def test_weights_that_a_conversion_joins_stay_together(source: str, targets: list[str]) -> None:
    model = tiny_model()
    model._weight_conversions = [WeightConverter(source, targets, [Chunk(dim=0)])]
    right = dict(Published(model))
    assert any("norms" in name for name in right)
    same(union(Share(model, Team(number, 3), SERVED) for number in range(3)), right.items())


def test_a_trainer_of_one_rank_shares_all_in_the_servers_type(tmp_path: Path) -> None:
    path = str(save_tiny_model(tmp_path / "model"))
    trainer = build_trainer(config(LEARNER, model={"path": path, "dtype": "float16"}), None)
    right = {name: tensor.half() for name, tensor in trainer.weights()}
    share = trainer.share()
    assert sorted(share.layout()) == sorted(right)
    assert all(torch.equal(tensor, right[name]) for name, tensor in share)
    assert trainer.share() is share, "its layout is worked out once"
