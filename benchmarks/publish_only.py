"""A learner that trains nothing and publishes the start weights after each batch: `learner.script` names this file.

The server is then the limit of the run, and `benchmarks.server_share` shows what publications take from it.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

import slipstream


def main() -> None:
    with slipstream.join() as run:
        model = AutoModelForCausalLM.from_pretrained(run.config.model.path, dtype=run.config.model.dtype)

        def score(ids: list[int]) -> torch.Tensor:
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
            return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

        run.publish(model.named_parameters(), score)
        for batch in run.batches():
            run.commit(batch, {})
            run.publish(model.named_parameters(), score)


if __name__ == "__main__":
    main()
