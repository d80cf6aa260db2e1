"""Loads a network whose weights are sharded over ranks: each rank reads its rows of the checkpoint, and no others.

The network is made on the meta device by transformers' own `from_pretrained`, from tensors without content: so names,
shapes, tied weights and conversions are those of a whole load, and so are its errors. Once it is sharded each rank
fills what it holds. A weight that a conversion makes from several of the checkpoint is made whole, one at a time, and
cut; of stacked experts a rank reads its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from slipstream.learner.model import export, loading
from slipstream.learner.ranks import wrapping
from slipstream.protocol.config import ConfigError, ModelSection

# Bytes to read of a file before it is opened again: pages that were read count as memory while a file is mapped.
REOPEN_BYTES = 64 << 20


class WholeLoadNeeded(Exception):
    """The checkpoint cannot be read by part. Says why."""


@dataclass
class _Source:
    """Weights of the checkpoint that become weights of the network together.

    Attributes:
        name: The network's weight; the first one where `converter` makes several.
        keys: The checkpoint's names by the pattern of the converter that they match, in its order.
        converter: None for a weight that only has another name.
    """

    name: str
    keys: dict[str, list[str]] = field(default_factory=dict)
    converter: Any = None

    def converted(self, network: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what becomes of the checkpoint's `tensors` in the network, by its names."""
        if self.converter is None:
            (tensor,) = tensors.values()
            return {self.name: tensor}
        converter = deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                if key in tensors:
                    converter.add_tensor(self.name, key, pattern, tensors[key])
        made = converter.convert(self.name, model=network, config=network.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    @property
    def stacks(self) -> bool:
        """Whether row i of the network's weight is made of the i-th weight of each pattern alone."""
        operations = [] if self.converter is None else self.converter.operations
        return (
            bool(operations)
            and isinstance(operations[0], MergeModulelist)
            and operations[0].dim == 0
            and all(isinstance(each, Concatenate) and each.dim > 0 for each in operations[1:])
        )


class Outline:
    """A network on the meta device, and where its weights lie.

    Args:
        path: Folder or hub name of the weights.
        dtype: Type of the weights.
        images: Whether it must see.

    Attributes:
        network: The transformers model, as `loading.load_network` would return it but for its content.

    Raises:
        WholeLoadNeeded: The checkpoint cannot be read by part.
        ConfigError: It cannot be loaded at all.
    """

    def __init__(self, path: str, model: ModelSection, dtype: torch.dtype, images: bool = False) -> None:
        revision = model.revision if path == model.path else None
        hub = {"revision": revision or "main", "trust_remote_code": model.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(path, **hub)
            files = export.checkpoint_files(path, revision, fetch=True)
            if files is None:
                raise WholeLoadNeeded("it has no safetensors files")
            if getattr(config, "quantization_config", None) is not None:
                raise WholeLoadNeeded("it is quantised")
            self._files = _Files(files)
            empty = {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in self._files.shapes.items()}
            with torch.device("meta"):
                of = loading.kind_of(config, images)
                kind = type(of.from_config(config, trust_remote_code=model.trust_remote_code))
            self.network = kind.from_pretrained(
                None,
                config=config,
                state_dict=empty,
                device_map="meta",
                dtype=dtype,
                attn_implementation=model.attention,
                generation_config=_generation_config(path, revision),
            )
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            raise ConfigError(loading.refusal(path, model, error)) from error
        self.network.config.name_or_path = path
        self._sources = self._assigned(empty)
        self._check_all_are_there(empty)

    def fill(self) -> None:
        """Fill the network with the weights of the checkpoint: this rank's rows of those that are sharded, and the rest
        whole. The network has memory that was not written yet."""
        tensors = self.network.state_dict()
        _initialise_buffers(self.network)
        for source in self._sources:
            self._fill(source, tensors)
        self._files.close()

    @torch.no_grad()
    def _fill(self, source: _Source, tensors: Mapping[str, torch.Tensor]) -> None:
        keys = [key for keys in source.keys.values() for key in keys]
        first = tensors[source.name]
        rows = wrapping.own_rows(first)
        if rows is not None and not rows:
            return
        if source.converter is None:
            read = {key: self._files.read(key, rows) for key in keys}
        elif source.stacks and rows is not None:
            read = {key: self._files.read(key) for own in source.keys.values() for key in own[rows.start : rows.stop]}
        else:
            read = {key: self._files.read(key) for key in keys}
        read = {key: tensor.to(first.dtype) for key, tensor in read.items()}
        cut = source.converter is None or source.stacks
        for name, made in source.converted(self.network, read).items():
            own = wrapping.own_rows(tensors[name])
            part = made if cut or own is None else made[own.start : own.stop]
            held = wrapping.local(tensors[name])
            if part.shape != held.shape:
                raise ValueError(f"{name}: {list(part.shape)} was read for {list(held.shape)}")
            held.copy_(part)

    def _assigned(self, empty: Mapping[str, torch.Tensor]) -> list[_Source]:
        """Assign the checkpoint's weights to the network's as transformers does when it loads."""
        network = self.network
        transforms = get_model_conversion_mapping(network)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, wanted = network.base_model_prefix, network.state_dict()
        sources: dict[str, _Source] = {}
        for key in sorted(empty, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
            if name in wanted:
                source = sources.setdefault(name, _Source(name, converter=of_pattern.get(pattern)))
                source.keys.setdefault(pattern or key, []).append(key)
        return list(sources.values())

    def _check_all_are_there(self, empty: Mapping[str, torch.Tensor]) -> None:
        """Raise `WholeLoadNeeded` unless each weight of the network is made of the checkpoint's, once."""
        network, wanted = self.network, self.network.state_dict(keep_vars=True)
        found: set[int] = set()
        for source in self._sources:
            tensors = {key: empty[key] for keys in source.keys.values() for key in keys}
            for name, tensor in source.converted(network, tensors).items():
                if name not in wanted or wanted[name].shape != tensor.shape:
                    raise WholeLoadNeeded(f"transformers' conversion of {name} is not understood")
                if id(wanted[name]) in found:
                    raise WholeLoadNeeded(f"it has {name} more than once")
                found.add(id(wanted[name]))
        if left := [name for name, tensor in wanted.items() if id(tensor) not in found]:
            raise WholeLoadNeeded(f"it lacks {left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""))
        for target, of in network.all_tied_weights_keys.items():
            if wanted.get(target) is not wanted.get(of):
                raise WholeLoadNeeded(f"it has both {target} and {of}, which may be one")


class _Files:
    """The weights of a checkpoint in safetensors.

    Attributes:
        shapes: By name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.shapes: dict[str, list[int]] = {}
        self._paths: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._left = 0
        for path in paths:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    self.shapes[key] = file.get_slice(key).get_shape()
                    self._paths[key] = path

    def read(self, key: str, rows: range | None = None) -> torch.Tensor:
        """Return a tensor, or some of its rows; its memory is the file's."""
        path = self._paths[key]
        if self._open is None or self._open[0] != path or self._left <= 0:
            self._open, self._left = (path, safe_open(path, "pt")), REOPEN_BYTES
        stored = self._open[1].get_slice(key)
        found: torch.Tensor = stored[:] if rows is None else stored[rows.start : rows.stop]
        self._left -= found.nbytes
        return found

    def close(self) -> None:
        """Give back the memory of the file that was read last."""
        self._open = None


def _initialise_buffers(network: Any) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies, as `from_pretrained` does."""
    for module in network.modules():
        module._is_hf_initialized = False
    for parameter in network.parameters():
        parameter._is_hf_initialized = True  # or each would be drawn at random first
    network.initialize_weights()


def _generation_config(path: str, revision: str | None) -> Any:
    try:
        return GenerationConfig.from_pretrained(path, revision=revision or "main")
    except OSError:
        return None
