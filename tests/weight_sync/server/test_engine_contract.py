"""The contract of inference servers over the fake, which every other test relies on. `tests/e2e` runs it over vLLM."""

from __future__ import annotations

import pytest

from tests.kit.engine_contract import CHECKS, RUN, VERSION
from tests.kit.fake_vllm import FakeEngine, FakeVllm, serving


@pytest.mark.parametrize("check", CHECKS)
async def test_the_fake_keeps_the_contract_of_a_server(check: str) -> None:
    engine = FakeEngine(policy=lambda ids, index: [50 + index] * 500, weight_version=f"{RUN}:{VERSION}")
    async with serving(FakeVllm(engine)) as url:
        await CHECKS[check](url)
