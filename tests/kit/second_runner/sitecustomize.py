"""Has vLLM's CPU build run Model Runner V2, which GPUs take, by Triton's interpreter: for `PYTHONPATH` of a server.

vLLM has a runner for that (`vllm.v1.worker.cpu.model_runner`), but wants Triton's CPU backend, which is in no release.
With `TRITON_INTERPRET=1` no backend is asked for anything: kernels run as Python on the CPU's tensors. So vLLM needs to
find a name alone.
"""

from types import SimpleNamespace

from triton import backends

backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
