"""TRL's `rollout_func`: a function of the script's that generates by itself, prompt by prompt.

It is played as an agent (docs/agents.md): called in the workers, once for each rollout, with one prompt. What it
generates through the trainer that it is given is sampled at the episode's endpoint, which records each token with its
log-prob and its version. That is what trains, whatever the function returns as ids; what it returns is for the rewards.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.rollout_worker.task.agent import AgentResult, Endpoint
from slipstream.rollout_worker.task.reward_base import RESULTS
from slipstream.rollout_worker.user_code.errors import is_async

logger = logging.getLogger(__name__)

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
# What TRL's own names are at the endpoint.
_NAMES = {"max_completion_length": "max_tokens"}


class RolloutFunc:
    """The agent that plays a `rollout_func`.

    Args:
        function: The script's.
        trainer: The trainer that it is given to.
    """

    def __init__(self, function: Callable[..., Any], trainer: Any) -> None:
        self._function = function
        self._trainer = trainer
        self._lock = threading.Lock()
        self._told = False
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, endpoint: Endpoint, prompt: Any, **_: Any) -> AgentResult:
        with self._lock:
            tokenizer = self._trainer.processing_class  # loaded once, whichever thread comes first
        shown = RolloutTrainer(self._trainer, endpoint, tokenizer)
        output = self._function([prompt], shown)
        if inspect.iscoroutine(output):
            output.close()
            raise TypeError(f"{self.__name__} is an async def; write it as def: it has its own thread")
        if not isinstance(output, Mapping) or (missing := [name for name in _NEEDED if name not in output]):
            missing = missing if isinstance(output, Mapping) else list(_NEEDED)
            raise ValueError(f"rollout_func must return keys {sorted(missing)} in its output dict.")
        if len(output["completion_ids"]) != 1:
            raise ValueError(
                f"{self.__name__} returned {len(output['completion_ids'])} completions for 1 prompt: it is called for "
                f"each rollout by itself, and trainer.num_generations is 1; return one for each of its prompts"
            )
        ids = [int(token) for token in output["completion_ids"][0]]
        self._look_for(shown.sampled, ids)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        completion = [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        more = {name: _of_one(value) for name, value in output.items() if name not in (*_NEEDED, "env_mask")}
        return AgentResult({"prompt": prompt, "ids": ids, "completion": completion, "more": more})

    def _look_for(self, sampled: Sequence[Sequence[int]], ids: Sequence[int]) -> None:
        """Tell once where what was sampled is not part of the completion: it trains all the same."""
        at = 0
        for answer in sampled:
            places = range(at, len(ids) - len(answer) + 1)
            found = next((place for place in places if [*ids[place : place + len(answer)]] == [*answer]), None)
            if found is None:
                if not self._told:
                    self._told = True
                    logger.warning(
                        "%s sampled an answer of %d tokens that is not in the completion_ids it returned; it trains, "
                        "with the rollout's reward",
                        self.__name__,
                        len(answer),
                    )
                return
            at = found + len(answer)


class RolloutTrainer:
    """The trainer as a `rollout_func` gets it: the script's own, but for what generates.

    Attributes:
        endpoint: The episode's endpoint, for clients of OpenAI's API.
        num_generations: 1: each rollout is its own call.
        vllm_generation: Has TRL's `generate`.
        sampled: Token ids of the answers so far.
    """

    num_generations = num_generations_eval = 1

    def __init__(self, trainer: Any, endpoint: Endpoint, tokenizer: Any) -> None:
        self.endpoint = endpoint
        self.processing_class = tokenizer
        self.vllm_generation = _Generation(self)
        self.sampled: list[list[int]] = []
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def complete(self, prompt: str | Sequence[int], n: int = 1, **given: Any) -> list[dict[str, Any]]:
        """Sample completions.

        Args:
            prompt: Token ids, or text, to which no special tokens are added.
            n: Number of completions.
            given: Further parameters of the endpoint, or TRL's names for them.

        Returns:
            prompt_ids, completion_ids, logprobs and text of each.

        Raises:
            RuntimeError: The endpoint refuses it, or the episode is over.
        """
        body = {_NAMES.get(name, name): value for name, value in given.items()}
        body |= {"model": self.endpoint.model, "prompt": prompt if isinstance(prompt, str) else [*map(int, prompt)]}
        body |= {"n": n, "logprobs": 0, "return_token_ids": True, "add_special_tokens": False}
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.endpoint.base_url}/completions", json.dumps(body).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request) as response:
                choices = json.load(response)["choices"]
        except urllib.error.HTTPError as error:
            said = json.loads(error.read() or b"{}").get("error", {}).get("message", error.reason)
            raise RuntimeError(f"the policy did not answer: {said}") from None
        self.sampled += [choice["token_ids"] for choice in choices]
        return [
            {
                "prompt_ids": choice["prompt_token_ids"],
                "completion_ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "text": choice["text"],
            }
            for choice in choices
        ]

    def rendered(self, prompt: Any) -> list[int] | str:
        """Return a prompt of messages as token ids, and others as they are."""
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], Mapping):
            return prompt  # type: ignore[no-any-return]
        variables = self._trainer.args.field("chat_template_kwargs") or {}
        render = self.processing_class.apply_chat_template
        ids = render(prompt, add_generation_prompt=True, return_dict=False, **variables)
        return [int(token) for token in ids]


class _Generation:
    """TRL's `trainer.vllm_generation`."""

    def __init__(self, trainer: RolloutTrainer) -> None:
        self._trainer = trainer

    def generate(
        self, prompts: Sequence[Any], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Return ids of prompts and completions, and log-probs with their ids for each token, as TRL's does.

        As there, `prompts` holds each prompt `num_generations` times.
        """
        if images is not None and any(images):
            raise ValueError("vllm_generation.generate(images=...): rollouts of a rollout_func are of text")
        found = [self._trainer.complete(self._trainer.rendered(prompt))[0] for prompt in prompts]
        return (
            [each["prompt_ids"] for each in found],
            [each["completion_ids"] for each in found],
            [[[logprob] for logprob in each["logprobs"]] for each in found],
            [[[token] for token in each["completion_ids"]] for each in found],
        )

    def sync_weights(self) -> None:
        """Do nothing: weights are pushed by the run."""


def with_results(reward: Any) -> Any:
    """Return a reward function that is called with what the `rollout_func` was given and returned: prompts,
    completions and their ids, and its other fields as columns. A classifier's name stays as it is."""
    if isinstance(reward, str):
        return reward
    try:
        parameters = inspect.signature(reward).parameters
        takes = None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else {*parameters}
    except (TypeError, ValueError):
        takes = None

    def given(columns: dict[str, Any]) -> dict[str, Any]:
        results = columns.pop(RESULTS)
        names = {name for result in results for name in result["more"]}
        columns |= {name: [result["more"].get(name) for result in results] for name in sorted(names)}
        columns |= {"prompts": [result["prompt"] for result in results]}
        columns |= {"completions": [result["completion"] for result in results]}
        columns |= {"completion_ids": [result["ids"] for result in results]}
        return {name: value for name, value in columns.items() if takes is None or name in takes}

    async def waits(**columns: Any) -> Any:
        return await reward(**given(columns))

    def calls(**columns: Any) -> Any:
        return reward(**given(columns))

    made = waits if is_async(reward) else calls
    made.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return made


def _of_one(value: Any) -> Any:
    """Return the value of a field for the one rollout: TRL gives a list's entry to each, and anything else to all."""
    return value[0] if isinstance(value, list) and value else value
