"""One fake vLLM server for every tier of tests: the routes and answers of vLLM 0.32, scripted replies, faults.

In a test: `async with serving(FakeVllm(...)) as url`. By hand: `python -m tests.kit.fake_vllm --port 0`.
"""

from tests.kit.fake_vllm.engine import FakeEngine
from tests.kit.fake_vllm.faults import Fault
from tests.kit.fake_vllm.policies import Policy
from tests.kit.fake_vllm.server import FakeVllm, serving

__all__ = ["FakeEngine", "FakeVllm", "Fault", "Policy", "serving"]
