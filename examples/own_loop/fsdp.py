"""The learner of `trainer.py` on several ranks: FSDP2 shards the model, and rank 0 speaks with the queue.

Started as one process, it starts its own ranks: `--learner.script examples/own_loop/fsdp.py`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from trainer import logprobs, loss_of
from transformers import AutoModelForCausalLM

import slipstream

RANKS = 2
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main(run, config):
    """Train on all ranks. `run` is None but on rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    copy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32) if run else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.learning_rate, betas=(0.9, 0.95))

    def publish():
        state = get_model_state_dict(model, options=WHOLE)  # gathered by all ranks, for rank 0
        if run:
            copy.load_state_dict(state)
            run.publish(state, lambda ids: logprobs(copy, torch.tensor([ids]))[0])

    publish()
    batches = run.batches() if run else None
    while (batch := from_rank_0(next(batches, None) if run else None)) is not None:
        parts = list(batch.split(-(-len(batch.input_ids) // ranks)))
        part = parts[min(rank, len(parts) - 1)]  # every rank computes; one without a part of its own adds nothing
        loss = loss_of(model, part, config.rollout.temperature) * (rank < len(parts))
        (loss * ranks).backward()  # FSDP takes the mean over ranks; parts add up
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if run:
            run.commit(batch, {"loss": total.item(), "grad_norm": norm})
        publish()
    if run:
        copy.save_pretrained(run.run_dir / "model")


def from_rank_0(thing):
    """Return what rank 0 has, on every rank."""
    holder = [thing]
    dist.broadcast_object_list(holder)
    return holder[0]


if __name__ == "__main__":
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        os.execv(sys.executable, [sys.executable, *torchrun, __file__, *sys.argv[1:]])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() == 0:
        with slipstream.join() as run:
            main(run, from_rank_0(run.config))
    else:
        main(None, from_rank_0(None))
    dist.destroy_process_group()
