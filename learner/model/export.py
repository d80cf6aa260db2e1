"""Exports a network's weights under the names of its checkpoint, which servers know.

transformers fuses and renames weights when it loads some architectures (the experts of a mixture become two tensors),
and undoes it when it saves. The same conversion, reversed, names what is published. A matrix with an adapter next to
it, or in 4 or 8 bits, is made whole when its turn comes, one at a time: there is no second copy of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from slipstream.learner.model import precision
from slipstream.learner.model.loading import text_parameters, text_tower
from slipstream.learner.ranks import wrapping
from slipstream.protocol.config import ConfigError

# peft's own name of the only adapter that a network has.
ADAPTER = "default"

# How many names an error shows.
SHOWN = 4


class Published:
    """Iterates over names and tensors, detached, as `save_pretrained` writes them: without frozen weights, tied weights
    once.

    Tensors are views of the parameters, except those that the conversion has to copy (halves of a fused tensor), and
    those that the `CheckpointView` makes, one at a time, as their turn comes.
    """

    def __init__(self, network: Any, held: CheckpointView | None = None) -> None:
        self._held = held or whole_view(network)
        self._tensors = converted(network, untied(network, self._held.tensors))

    def layout(self) -> dict[str, torch.Tensor]:
        """Return the same with stand-ins for tensors that are yet to be made."""
        return self._tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, self._held.whole(tensor)


@contextmanager
def writers_left_out(network: Any) -> Iterator[None]:
    """Have `save_pretrained` write weights and code alone, inside.

    Its writers of config.json and generation_config.json refuse values that its readers have taken.
    """
    with ExitStack() as stack:
        for part in (network.config, getattr(network, "generation_config", None)):
            if part is not None:
                part.save_pretrained = lambda folder, **options: None
                stack.callback(delattr, part, "save_pretrained")
        yield


def gathered(network: Any, keep: bool) -> list[tuple[str, torch.Tensor]]:
    """Gather the published weights of a network that is divided among ranks; all ranks must call it.

    Whole tensors, on the host of a rank with `keep`; nothing on the others.
    """
    whole = wrapping.gathered(untied(network, _trained_state(network)), keep)
    return list(converted(network, whole).items()) if keep else []


def converted(network: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a network as its checkpoint has them, by the checkpoint's names."""
    conversions = getattr(network, "_weight_conversions", None)  # set by `from_pretrained`; [] where it did nothing
    return dict(state if conversions == [] else revert_weight_conversion(network, state))


def untied(network: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with a tied one once, by the name that `save_pretrained` keeps."""
    if not any(isinstance(tensor, DTensor) for tensor in state.values()):
        once: dict[str, torch.Tensor] = remove_tied_weights_from_state_dict(dict(state), network)
        return once
    parameters = dict(network.named_parameters())  # a tied one once, by its first name
    named = set(dict(network.named_parameters(remove_duplicate=False)))
    return {name: tensor for name, tensor in state.items() if name in parameters or name not in named}


def saved_view(network: Any) -> CheckpointView:
    """View all that `save_pretrained` writes, weights that do not train included."""
    ignored = set(network._keys_to_ignore_on_save or [])
    state = network.state_dict().items()
    return CheckpointView({name: tensor.detach() for name, tensor in state if name not in ignored}, {})


def stand_ins(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same names, shapes and types without content."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}


def whole_view(network: Any) -> CheckpointView:
    """View a network all of whose weights train."""
    return CheckpointView(_trained_state(network), {})


def trained_names(network: Any) -> list[str]:
    """Return the names of all that is published, a tied weight by each of its names."""
    return list(_trained_state(network))


def check_export(network: Any, path: str, revision: str | None, adapted: CheckpointView | None = None) -> None:
    """Raise `ConfigError` if the published weights do not have the names and shapes of the checkpoint at `path`, or if
    a trained weight is not published exactly once. Only checkpoints in safetensors are compared."""
    kept = adapted or whole_view(network)
    own: dict[tuple[int, Any], int]
    if any(isinstance(tensor, DTensor) for tensor in kept.tensors.values()):
        state = untied(network, kept.tensors)
        weights = converted(network, stand_ins(state))
        own = {(number, 0): tensor.numel() for number, tensor in enumerate(state.values())}
    else:
        weights = Published(network, kept).layout()
        own = {(address(tensor), tensor.storage_offset()): tensor.numel() for tensor in kept.tensors.values()}
    exported = sum(tensor.numel() for tensor in weights.values())
    if exported != sum(own.values()):
        raise ConfigError(
            f"model.path = {path}: {type(network).__name__} has {sum(own.values())} weights to publish, and its "
            f"conversion to a checkpoint gives {exported}: the servers would serve something else; choose another model"
        )
    made = [tensor for tensor in kept.tensors.values() if kept.made and address(tensor) in kept.made]
    whole = {address(tensor): tensor.shape for tensor in made}
    for name, tensor in weights.items():
        if whole and whole.get(address(tensor), tensor.shape) != tensor.shape:
            raise ConfigError(
                f"model.path = {path}: {name} is a part of a matrix that has an adapter, as transformers' conversion "
                f"to a checkpoint takes it apart: leave its layer out with lora.exclude_modules"
            )
    held = _checkpoint_shapes(path, revision)
    if held is None:
        return
    prefix = f"{network.base_model_prefix}."
    wrong = []
    for name, tensor in weights.items():
        shape = next((held[key] for key in (name, name.removeprefix(prefix), prefix + name) if key in held), None)
        if shape is None or shape != list(tensor.shape):
            wrong.append(f"{name} {list(tensor.shape)} ({f'there {shape}' if shape else 'not there'})")
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ConfigError(
            f"model.path = {path}: weights that train are not in its checkpoint under the name and shape with which "
            f"they would be published: {', '.join(wrong[:SHOWN])}{more}. Servers would not take them: choose another "
            f"model, or load it with transformers' {type(network).__name__}, save it and serve what was saved"
        )


def _trained_state(network: Any) -> dict[str, torch.Tensor]:
    """Return parameters of the text tower and the output layer, and the tower's buffers that a checkpoint holds."""
    named = dict(network.named_parameters(remove_duplicate=False))
    buffers = dict(network.named_buffers(remove_duplicate=False))
    ignored, text = set(network._keys_to_ignore_on_save or []), text_parameters(network)
    tower = text_tower(network)
    prefix = next((f"{name}." for name, module in network.named_modules() if module is tower and name), "")
    return {
        name: tensor.detach()
        for name, tensor in network.state_dict().items()
        if name not in ignored
        and (id(named[name]) in text if name in named else name in buffers and name.startswith(prefix))
    }


def _checkpoint_shapes(path: str, revision: str | None) -> dict[str, list[int]] | None:
    """Read shapes by name; None where the checkpoint is of another kind. It was loaded before, so nothing is
    fetched."""
    files = checkpoint_files(path, revision)
    if files is None:
        return None
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as held:
            shapes |= {key: held.get_slice(key).get_shape() for key in held.keys()}  # noqa: SIM118
    return shapes


def checkpoint_files(path: str, revision: str | None, fetch: bool = False) -> list[Path] | None:
    """Find the safetensors files of a checkpoint; None where it has none, or not all.

    Args:
        path: Folder or hub name.
        fetch: Whether to fetch those of a hub that are not here yet.
    """
    one = _file(path, SAFE_WEIGHTS_NAME, revision, fetch)
    if one is not None:
        return [one]
    index = _file(path, SAFE_WEIGHTS_INDEX_NAME, revision, fetch)
    if index is None:
        return None
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [_file(path, name, revision, fetch) for name in names]
    return [file for file in files if file is not None] if all(files) else None


def _file(path: str, name: str, revision: str | None, fetch: bool) -> Path | None:
    found = cached_file(
        path, name, revision=revision, local_files_only=not fetch, _raise_exceptions_for_missing_entries=False
    )
    return None if found is None else Path(found)


@dataclass(frozen=True)
class CheckpointView:
    """A network's tensors under the names of its checkpoint, some as stand-ins.

    Attributes:
        tensors: By name, the network's own, detached, or a stand-in of the right shape and type that takes no memory.
        made: Makes a stand-in's tensor, by the address of its storage.
    """

    tensors: Mapping[str, torch.Tensor]
    made: Mapping[int, Callable[[], torch.Tensor]]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that `tensor`, one of `tensors`, stands for."""
        make = self.made.get(address(tensor))
        return tensor if make is None else make()


def held(network: Any, names: Iterable[str], dtype: torch.dtype) -> CheckpointView:
    """View the tensors of a network.

    Args:
        names: As they were before there was an adapter.
        dtype: Of matrices that are made.
    """
    tensors, made = {}, {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = _module(network, path)
        base = _base(module)
        own: torch.Tensor = getattr(base, leaf).detach()
        if leaf == "weight" and (base is not module or precision.is_quantised(base)):
            shape = (base.out_features, base.in_features) if precision.is_quantised(base) else own.shape
            own = torch.empty(1, dtype=dtype, device=own.device).expand(shape)
            made[address(own)] = _maker(module, base, dtype)
        tensors[name] = own
    return CheckpointView(tensors, made)


def address(tensor: torch.Tensor) -> int:
    """Return where the tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def merged_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Merge a layer's adapter into its matrix: W + s B A (arXiv:2106.09685, section 4.1), or, with DoRA, each row of
    that at its own length m (arXiv:2402.09353, eq. 5).

    Args:
        weight: [out, in], the layer's own.

    Returns:
        float32 [out, in].
    """
    whole: torch.Tensor = weight.float() + layer.get_delta_weight(ADAPTER).float()
    if ADAPTER in layer.lora_magnitude_vector:
        length = layer.lora_magnitude_vector[ADAPTER].weight.float()
        whole *= (length / torch.linalg.norm(whole, dim=1))[:, None]
    return whole


def _maker(module: Any, base: Any, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        weight = precision.dequantised_weight(base) if precision.is_quantised(base) else base.weight.detach()
        return (weight if module is base else merged_weight(module, weight)).to(dtype)

    return make


def _module(network: Any, path: str) -> Any:
    """Return the module that trains at that path: a module of `modules_to_save` differs from the one that it stands
    for."""
    module = network
    for part in path.split(".") if path else ():
        module = _training(getattr(_base(module), part))
    return module


def _training(module: Any) -> Any:
    copies = getattr(module, "modules_to_save", None)
    return module if copies is None else copies[ADAPTER]


def _base(module: Any) -> Any:
    """Return the layer below an adapter's."""
    return module.base_layer if hasattr(module, "lora_A") else module
