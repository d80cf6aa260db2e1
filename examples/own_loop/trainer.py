"""GRPO in plain PyTorch: the learner of this run : `learner.script` names this file."""

import torch
from transformers import AutoModelForCausalLM

import slipstream


def logprobs(model, input_ids, attention_mask=None, temperature=1.0):
    """Return log p(token t | tokens before t), float32 [B, T - 1]."""
    logits = model(input_ids, attention_mask=attention_mask).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def loss_of(model, part, temperature):
    """Return GRPO's clipped loss of a part of a batch; those of all parts add up to the step's."""
    new = logprobs(model, part.input_ids, part.attention_mask, temperature)
    ratio = (new - part.behaviour[:, 1:]).exp()
    gain = torch.min(ratio * part.advantages[:, 1:], ratio.clamp(0.8, 1.2) * part.advantages[:, 1:])
    return -(gain * part.weights[:, 1:]).sum()


def main():
    with slipstream.join() as run:
        model = AutoModelForCausalLM.from_pretrained(run.config.model.path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.learner.learning_rate, betas=(0.9, 0.95))

        def publish():
            run.publish(model.named_parameters(), lambda ids: logprobs(model, torch.tensor([ids]))[0])

        publish()
        for batch in run.batches():
            loss = 0.0
            for part in batch.split(32):
                part_loss = loss_of(model, part, run.config.rollout.temperature)
                part_loss.backward()
                loss += part_loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.commit(batch, {"loss": loss, "grad_norm": norm})
            publish()
        model.save_pretrained(run.run_dir / "model")


if __name__ == "__main__":
    main()
