"""What is added to each of vLLM's workers: `--worker-extension-cls weight_sync.vllm.worker.SlipstreamWorker`.

Called by `engine.collective_rpc("slipstream_...")`. vLLM refuses an extension that has an attribute of the worker's
name, so every name begins with `slipstream_`.
"""

from __future__ import annotations

from weight_sync.vllm.adapter_score import AdapterMixin
from weight_sync.vllm.proof_worker import ProofMixin
from weight_sync.vllm.staging_worker import StagingMixin


class SlipstreamWorker(StagingMixin, ProofMixin, AdapterMixin):
    """Mixed into vLLM's own worker class."""
