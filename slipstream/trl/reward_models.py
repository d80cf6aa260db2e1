"""Rewards that are models: a classifier with one label, which each worker loads when it first scores.

A model on a pooling server (`task.reward_servers`) is better where it is large, and one that a script names there is
left to it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.protocol.config import ConfigError
from slipstream.trl.models import check_object


class ModelReward:
    """A reward function whose value is a classifier's logit for prompt and completion.

    Args:
        model: Folder or name of the model, or an object of transformers.
        processing_class: Its tokenizer; None to load the model's own.
        variables: `chat_template_kwargs`.
        trust_remote_code: Whether the model's own code may run.
    """

    def __init__(
        self, model: Any, processing_class: Any, variables: dict[str, Any] | None, trust_remote_code: bool
    ) -> None:
        self._model = model
        self.processing_class = processing_class
        self._variables = variables or {}
        self._trust = trust_remote_code
        self._lock = threading.Lock()
        name = model if isinstance(model, str) else str(getattr(model, "name_or_path", "") or type(model).__name__)
        self.__name__ = name.rstrip("/").split("/")[-1]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        with self._lock:
            model, tokenizer = self._loaded()
            texts = [self._text(prompt, answer, tokenizer) for prompt, answer in zip(prompts, completions, strict=True)]
            given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
            logits = model(**{name: values.to(model.device) for name, values in given.items()}).logits
        return [float(value) for value in logits[:, 0]]

    def check(self, kind: str) -> None:
        """Raise `ConfigError` if the model is a name, and no model of that name can be loaded.

        Args:
            kind: Name of the trainer's class, for the message.
        """
        from transformers import AutoConfig

        if not isinstance(self._model, str):
            return
        try:
            AutoConfig.from_pretrained(self._model, trust_remote_code=self._trust)
        except (OSError, ValueError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"{kind}(reward_funcs={self._model!r}): not a model that can be loaded: {first}; give the folder or "
                f"hub name of a classifier with one label, or a function"
            ) from None

    def _text(self, prompt: Any, completion: Any, tokenizer: Any) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        messages = [*prompt, *completion]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **self._variables))

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if isinstance(self._model, str):
            name = self._model
            self._model = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, trust_remote_code=self._trust
            )
        self._model.eval().requires_grad_(False)
        if self.processing_class is None or isinstance(self.processing_class, str):
            path = self.processing_class or self._model.config._name_or_path
            self.processing_class = AutoTokenizer.from_pretrained(path, trust_remote_code=self._trust)
        if self.processing_class.pad_token_id is None:
            self.processing_class.pad_token = self.processing_class.eos_token
        self._model.config.get_text_config().pad_token_id = self.processing_class.pad_token_id
        return self._model, self.processing_class


def rewards_of(
    given: Any, classes: Any, served: Sequence[str], variables: dict[str, Any] | None, trust: bool, kind: str
) -> Any:
    """Return a trainer's `reward_funcs` with a function in the place of each model.

    Args:
        given: `reward_funcs`.
        classes: `reward_processing_classes`.
        served: Models that have a server.
        variables: `chat_template_kwargs`.
        trust: `trust_remote_code`.
        kind: Name of the trainer's class, for messages.

    Raises:
        ConfigError: There is another number of classes than of rewards, or an object is neither function nor model.
    """
    if given is None:
        return None
    rewards = list(given) if isinstance(given, list | tuple) else [given]
    several = (
        list(classes) if isinstance(classes, list | tuple) else [classes] * (len(rewards) if classes is None else 1)
    )
    if len(several) != len(rewards):
        raise ConfigError(
            f"{kind}(reward_processing_classes=...): the number of reward processing classes, {len(several)}, must "
            f"match the number of reward functions, {len(rewards)}; give None for a function"
        )
    made = []
    for reward, processing_class in zip(rewards, several, strict=True):
        is_model = hasattr(reward, "save_pretrained") or isinstance(reward, Path)
        if is_model or (isinstance(reward, str) and reward not in served):
            check_object(reward, kind)
            reward = ModelReward(
                str(reward) if isinstance(reward, Path) else reward, processing_class, variables, trust
            )
        made.append(reward)
    return made
