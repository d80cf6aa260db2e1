"""An adapter that trains while the model's own weights stay (LoRA, arXiv:2106.09685), by peft.

Its weights are float32 whatever the base has. It is published merged, under the checkpoint's names, so servers need not
know of it; or by itself, to servers that load it next to the base. A checkpoint holds it as peft does, next to the
merged model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.learner.model import adapter_checks, export, precision
from slipstream.learner.model.export import ADAPTER, CheckpointView, held
from slipstream.learner.model.loading import text_tower
from slipstream.protocol.config import ConfigError, LoraSection, ModelSection

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# Names that peft takes for parts of experts.
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# Layers whose weights these architectures compute with past an adapter; peft refuses the first two.
_OF_MAMBA = {"out_proj", "conv1d", "x_proj", "dt_proj"}
_MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
_DEFAULTS = {name: field.default for name, field in LoraSection.model_fields.items()}
# Settings that may change from one start to the next without changing what the adapter computes.
_OF_THE_START = ("lora_dropout", "init_lora_weights")


@dataclass(frozen=True)
class AdapterAlone:
    """An adapter's own weights, named by peft, and the content of its `adapter_config.json`."""

    tensors: Mapping[str, torch.Tensor]
    adapter_config: Mapping[str, Any]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class Adapter:
    """The adapter of one network, which becomes a part of that network.

    Args:
        dtype: Type of merged matrices, that of the base.

    Raises:
        ConfigError: A layer cannot have an adapter.
    """

    def __init__(self, network: Any, lora: LoraSection, model: ModelSection, dtype: torch.dtype) -> None:
        check_installed(lora)
        from peft import LoraConfig, get_peft_model

        self._network, self._dtype = network, dtype
        self._published = export.trained_names(network)
        adapter_checks.check_adapter_names(lora, adapter_checks.ModuleNames.of(network))
        self._saved = [name for name in network.state_dict() if not _is_packed(network, name)]
        of_base = {"base_model_name_or_path": model.path, "revision": model.revision}
        _check_tied(network, lora)
        arguments = _arguments(lora, network)
        try:
            config = LoraConfig(task_type="CAUSAL_LM", **of_base, **arguments)
            self._peft: Any = get_peft_model(network, config, adapter_name=ADAPTER)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError) as error:
            given = ", ".join(f"lora.{name} = {value}" for name, value in lora if value != _DEFAULTS[name])
            raise ConfigError(f"{given}: no adapter of this kind fits {type(network).__name__}: {error}") from error
        self._check_layers(lora)
        self._keep_in_float32()

    @property
    def trained(self) -> int:
        """Number of weights that train."""
        return sum(parameter.numel() for parameter in self._network.parameters() if parameter.requires_grad)

    def published(self) -> CheckpointView:
        """Return the weights that the network publishes, by the names that they had without the adapter."""
        return held(self._network, self._published, self._dtype)

    def alone(self) -> AdapterAlone:
        """Return the adapter's own weights, to publish in place of `published` to servers that load adapters."""
        return AdapterAlone(self.tensors(), self.config())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's own weights under the names of `adapter_model.safetensors`, detached, float32. With
        `config` they are what a server needs to load the adapter."""
        from peft import get_peft_model_state_dict

        state: dict[str, torch.Tensor] = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def config(self) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        found: dict[str, Any] = self._peft.peft_config[ADAPTER].to_dict()
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
        return {**plain, "inference_mode": True}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapter off inside the `with`, so that the network is the base. Compute nothing there that needs
        a gradient."""
        self._peft.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._peft.base_model.enable_adapter_layers()

    def save(self, folder: Path) -> None:
        """Write it as peft does: `PeftModel.from_pretrained(base, folder)` loads it."""
        folder.mkdir(parents=True)
        config = self._peft.peft_config[ADAPTER]
        training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(folder)
        finally:
            config.inference_mode = training
        state = {name: tensor.to("cpu").contiguous() for name, tensor in self.tensors().items()}
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    def save_merged(self, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write a model folder without a trace of the adapter. Copies the matrices to the host.

        Args:
            state: Empty to write no weights; else it is the merged weights that are written.
        """
        if state is None or state:
            whole = held(self._network, self._saved, self._dtype)
            state = {name: whole.whole(tensor).to("cpu") for name, tensor in whole.tensors.items()}
        network = self._network
        # A quantised model would write its own weights instead.
        quantiser = getattr(network, "hf_quantizer", None)
        if quantiser is not None:
            network.hf_quantizer = None
        try:
            network.save_pretrained(folder, state_dict=state)
        finally:
            if quantiser is not None:
                network.hf_quantizer = quantiser

    def check_same(self, folder: Path) -> None:
        """Raise `ConfigError` where the adapter that `save` wrote to `folder` is of another kind."""
        from peft import LoraConfig

        try:
            config = LoraConfig.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError) as error:
            raise _unusable(folder, error) from error
        ours = self._peft.peft_config[ADAPTER]
        changed = [
            f"lora.{name} = {getattr(ours, name)} (was {getattr(config, name)})"
            for name in LoraSection.model_fields
            if name not in _OF_THE_START and getattr(ours, name) != getattr(config, name)
        ]
        if changed:
            raise ConfigError(
                f"{folder}: the checkpoint's adapter is another: {', '.join(changed)}; continue with the settings that "
                f"it was made with, or begin a new run with --model.path {folder.parent / 'model'}"
            )

    def load(self, folder: Path) -> None:
        """Load what `save` wrote to `folder`, to the bit. Raises `ConfigError` where that is of another kind."""
        from peft import set_peft_model_state_dict

        self.check_same(folder)
        try:
            state = load_file(folder / WEIGHTS)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise _unusable(folder, error) from error
        set_peft_model_state_dict(self._peft, state, adapter_name=ADAPTER)
        loaded = self.tensors()
        if loaded.keys() != state.keys() or not all(torch.equal(loaded[n].cpu(), state[n]) for n in state):
            raise ConfigError(
                f"{folder / WEIGHTS}: its weights are not those of this model's adapter: continue with the model.path "
                f"that it was made with"
            )

    def _check_layers(self, lora: LoraSection) -> None:
        """Allow only layers that rows pass through, and whose product with the adapter can be computed."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        network = self._network
        named = network.named_modules()
        adapter_checks.check_rank_patterns(lora, [name for name, module in named if isinstance(module, BaseTunerLayer)])
        inside = {id(module) for module in text_tower(network).modules()}
        output = network.get_output_embeddings()
        for name, module in network.named_modules():
            if not isinstance(module, BaseTunerLayer):
                continue
            named = f"lora.target_modules = {lora.target_modules}: {name}"
            if module is output:
                raise ConfigError(
                    f"{named} is the output layer, from whose weight the learner computes log-probs; leave it out, or "
                    f'train it whole where it is not tied, with lora.modules_to_save = ["{name}"]'
                )
            if id(module) not in inside:
                raise ConfigError(
                    f"{named} is outside of the part that reads text, and would learn nothing; leave it out"
                )
            if not isinstance(module.get_base_layer(), torch.nn.Linear):
                raise ConfigError(
                    f"{named} is a {type(module.get_base_layer()).__name__}, and only linear layers can have an "
                    f"adapter; leave it out"
                )

    @torch.no_grad()
    def _keep_in_float32(self) -> None:
        """Keep trained weights in float32: 16 bits would lose small steps, and DoRA's lengths in 16 bits would change
        the base."""
        for module in self._network.modules():
            if hasattr(module, "lora_magnitude_vector") and ADAPTER in module.lora_magnitude_vector:
                base = module.get_base_layer()
                weight = precision.dequantised_weight(base) if precision.is_quantised(base) else base.weight
                length = torch.linalg.norm(weight.float(), dim=1)
                module.lora_magnitude_vector[ADAPTER].weight = torch.nn.Parameter(length)
        for parameter in self._network.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def check_installed(lora: LoraSection) -> None:
    """Raise `ConfigError` where peft is missing."""
    if find_spec("peft") is None:
        raise ConfigError(
            f"lora.r = {lora.r} needs peft, which is not installed: pip install 'slipstream-rl[lora]', or leave it out"
        )


def _unusable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder}: holds no adapter that can be loaded: {error}; begin a new run")


def _check_tied(network: Any, lora: LoraSection) -> None:
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    if inputs.weight is not outputs.weight:
        return
    tied = [name for name, module in network.named_modules() if module is inputs or module is outputs]
    for wanted in lora.modules_to_save:
        if any(name == wanted or name.endswith(f".{wanted}") for name in tied):
            raise ConfigError(
                f"lora.modules_to_save = {lora.modules_to_save}: {wanted} shares its weight with "
                f"{' and '.join(name for name in tied if not name.endswith(wanted))}, and one would train without the "
                f"other; leave it out, or train all weights, without lora.r"
            )


def _arguments(lora: LoraSection, network: Any) -> dict[str, Any]:
    """Return the arguments of peft's `LoraConfig`."""
    return {
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": _targets(lora, network),
        "exclude_modules": lora.exclude_modules or None,
        "layers_to_transform": lora.layers_to_transform or None,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "modules_to_save": lora.modules_to_save or None,
        "bias": lora.bias,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "init_lora_weights": lora.init_lora_weights,
    }


def _targets(lora: LoraSection, network: Any) -> str | list[str] | None:
    """Return the target modules in peft's form. In a model with vision they are those of its text tower alone.

    What all-linear leaves out: in a mixture names such as up_proj, since transformers has the matrices of all experts
    in one tensor, and peft takes such a name for that tensor; routers that are layers of their own kind; and what peft
    refuses in models with a state.
    """
    wanted = lora.target_modules
    if wanted == "auto":
        return None
    tower = text_tower(network)
    prefix = next((name for name, module in network.named_modules() if module is tower), "")
    sees = any(isinstance(module, torch.nn.Linear) for module in _others(network, tower))
    if sees and lora.layers_to_transform:
        numbers = "|".join(map(str, lora.layers_to_transform))
        raise ConfigError(
            f"lora.layers_to_transform = {lora.layers_to_transform}: {type(network).__name__} has layers of images of "
            f"these numbers, too; leave it out, and give lora.target_modules an expression of whole names, such as "
            f"'{re.escape(prefix)}\\.layers\\.({numbers})\\..*(q_proj|v_proj)'"
        )
    linear = {
        name.rpartition(".")[2]: type(module)
        for name, module in tower.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    left_out = {name for name, kind in linear.items() if "Router" in kind.__name__}
    if any(parameter.ndim == 3 for parameter in tower.parameters()):
        left_out |= _OF_EXPERTS
    if network.config.model_type in _MAMBA:
        left_out |= _OF_MAMBA
    # peft treats all-linear as an expression, and takes no numbers of layers with one.
    if wanted == "all-linear" and (sees or left_out or lora.layers_to_transform):
        wanted = sorted(linear.keys() - left_out)
    if isinstance(wanted, str) or not sees:
        return wanted
    return rf"{re.escape(prefix)}\.(.*\.)?({'|'.join(re.escape(name) for name in wanted)})"


def _others(network: Any, tower: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules outside the tower, except the output layer."""
    inside = {id(module) for module in (*tower.modules(), network.get_output_embeddings())}
    yield from (module for module in network.modules() if id(module) not in inside)


def _is_packed(network: Any, name: str) -> bool:
    """Say whether an entry of the network's state is neither a parameter nor a buffer: quantised layers keep such."""
    path, _, leaf = name.rpartition(".")
    try:
        module = network.get_submodule(path)
    except AttributeError:
        return True
    return leaf not in module._parameters and leaf not in module._buffers
