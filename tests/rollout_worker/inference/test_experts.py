"""The experts that vLLM records: read, joined over the turns of a segment, and asked for once."""

import base64
import io

import numpy as np
import pytest

from slipstream.protocol import codec, reasons
from slipstream.protocol.messages import RoutedExperts, Segment
from slipstream.rollout_worker.episodes.episode import SegmentDraft
from slipstream.rollout_worker.inference.engine import Sampled, SampledSpan
from slipstream.rollout_worker.inference.experts import RecordedExperts, known_until
from slipstream.rollout_worker.inference.failures import BadSample
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.inference.sampler import Sampler
from slipstream.rollout_worker.inference.wire import recorded_experts
from tests.kit import WORKER, config
from tests.kit.stand_in_queue import serving_at
from tests.kit.worker import END_OF_TURN

LAYERS, TOP_K = 3, 2


def ids_of(start, end, dtype=np.uint8):
    """Experts that tell which token they are of."""
    return np.arange(start, end, dtype=dtype).repeat(LAYERS * TOP_K).reshape(-1, LAYERS, TOP_K)


def answer(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_they_are_of_each_token_but_the_last(dtype):
    (found,) = recorded_experts(answer(ids_of(4, 12, dtype)), start=4, prompt=10, sampled=3)
    assert (found.start, found.end, found.ids.dtype) == (4, 12, dtype)
    assert found.ids[0].tolist() == [[4, 4]] * LAYERS


@pytest.mark.parametrize("text", [None, answer(ids_of(4, 11)), answer(ids_of(4, 13))])
def test_what_cannot_be_told_token_by_token_is_not_known(text):
    assert recorded_experts(text, start=4, prompt=10, sampled=3) == []


@pytest.mark.parametrize(
    "text",
    [
        "no base 64!",
        base64.b64encode(b"no array").decode(),
        answer(ids_of(0, 2).astype(np.int64)),
        answer(ids_of(0, 2)[0]),
        answer(np.zeros((2, 0, 2), np.uint8)),
        answer(np.array([{}], dtype=object), allow_pickle=True),
        answer(ids_of(0, 20))[:40],
    ],
)
def test_i8_anything_else_spoils_the_sample(text):
    with pytest.raises(BadSample) as error:
        recorded_experts(text, start=0, prompt=2, sampled=1)
    assert error.value.reason == reasons.BAD_EXPERTS


class Continued:
    index = 0

    def __init__(self, sampled):
        self.token_ids = sampled.token_ids
        self._sampled = sampled

    def checked(self, known):
        return self._sampled


class RecordingEngine:
    """Records experts. The first request is aborted after two tokens."""

    def __init__(self):
        self.asked = []

    async def generate(self, server, request):
        start, prompt = request.experts_from, len(request.token_ids)
        self.asked.append((start, prompt))
        if start is None:
            start = 0
        aborted = len(self.asked) == 1
        tokens = [50, 51] if aborted else [52, END_OF_TURN]
        recorded = RecordedExperts(start, ids_of(start, prompt + 1))
        yield Continued(
            Sampled(
                tokens,
                [-0.5] * 2,
                [SampledSpan(7, 0, 2, server.name)],
                "abort" if aborted else "stop",
                [] if request.experts_from is None else [recorded],
            )
        )


def sampler_of(client, **learner):
    async def unused(*_):
        """Nothing is reported or aborted."""

    pool = ServerPool(unused, unused)
    pool.update(serving_at("http://a", version=7))
    return Sampler(client, pool, config(WORKER, learner=learner), [END_OF_TURN])


async def test_each_token_is_asked_for_once_over_aborts_and_turns():
    client = RecordingEngine()
    sampler, draft, affinity = sampler_of(client, router_replay=True), SegmentDraft([1, 2, 3]), Affinity()
    draft.add([], await sampler.sample(affinity, draft.ids, 8))
    assert client.asked == [(0, 3), (4, 5)]
    suffix = [8, 9]
    draft.add(suffix, await sampler.sample(affinity, draft.ids + suffix, 8, known=known_until(draft.experts)))
    assert client.asked[2:] == [(6, 9)]
    found = draft.segment(["vllm-0"]).experts
    assert found is not None
    assert (found.layers, found.top_k, found.spans) == (LAYERS, TOP_K, [(0, 10)])
    assert found.by_token()[:, 0, 0].tolist() == list(range(10))
    assert len(draft.ids) == 11


async def test_a_run_without_replay_keeps_none_and_its_groups_are_on_the_wire_as_before():
    client, draft = RecordingEngine(), SegmentDraft([1, 2, 3])
    draft.add([], await sampler_of(client).sample(Affinity(), draft.ids, 8))
    segment = draft.segment(["vllm-0"])
    assert segment.experts is None
    assert b"experts" not in codec.encode(segment)


def test_they_travel_with_their_type():
    sent = Segment(
        np.zeros(3, np.int32),
        np.zeros(3, np.bool_),
        np.zeros(3, np.float32),
        [],
        RoutedExperts(ids_of(300, 302, np.uint16).reshape(-1), LAYERS, TOP_K, [(1, 3)]),
    )
    came = codec.decode(codec.encode(sent), Segment)
    assert came.experts is not None
    assert (came.experts.by_token() == ids_of(300, 302, np.uint16)).all()
    assert came.experts.spans == [(1, 3)]
