"""New weights into a live model by copying them into its tensors, which stay where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Copies:
    """Pairs of tensors: of the live model, and of a model of the same modules that holds the new weights.

    What a module keeps as an attribute beside its parameters and buffers counts as well: some layers compute with
    products of their weights (multi-head latent attention).
    """

    def __init__(self, live: torch.nn.Module, new: torch.nn.Module) -> None:
        """Raises ValueError, before anything is touched, where the two differ in modules, names, shapes or types."""
        self._pairs = list(_pairs(live, new))

    def exchange(self) -> None:
        """Make the live model compute with the new weights; generation must stand still. Returns when that is so."""
        with torch.no_grad():
            for to, new in self._pairs:
                to.copy_(new, non_blocking=True)
            if self._pairs and self._pairs[0][0].is_cuda:
                # A copy that failed raises here, inside the pause, and not in somebody's forward.
                torch.cuda.current_stream(self._pairs[0][0].device).synchronize()


def _pairs(live: torch.nn.Module, new: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    modules, others = dict(live.named_modules()), dict(new.named_modules())
    if modules.keys() != others.keys():
        odd = sorted(modules.keys() ^ others.keys())[0]
        raise ValueError(f"the new model and the live one differ in the module {odd}")
    seen: set[tuple[int, int]] = set()
    for path, module in modules.items():
        held, made = _tensors(module), _tensors(others[path])
        for name in sorted(held.keys() | made.keys()):
            where = f"{path}.{name}" if path else name
            if name not in held or name not in made:
                raise ValueError(f"{where} is in the {'new' if name in made else 'live'} model only")
            to, source = held[name], made[name]
            if (to.shape, to.dtype, to.device) != (source.shape, source.dtype, source.device):
                raise ValueError(
                    f"{where} is {list(source.shape)} {source.dtype} on {source.device}, and {list(to.shape)} "
                    f"{to.dtype} on {to.device} in the live model"
                )
            place = (to.data_ptr(), source.data_ptr())
            # Shared between the two, or tied to one that is copied.
            if to.data_ptr() != source.data_ptr() and place not in seen:
                seen.add(place)
                yield to, source


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    registered = {**module._parameters, **module._buffers}
    return attributes | {name: tensor for name, tensor in registered.items() if tensor is not None}
