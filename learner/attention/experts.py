"""Has the routers of a mixture choose given experts in place of their own choice (R3, arXiv:2510.11370).

A router chooses with `torch.topk` over the experts' scores. Inside the module that makes this call, the call is
answered with the given experts and with the scores that the router has for them, gradient included. What a model makes
of the scores stays its own: softmax before or after, a norm, a scale, a bias for the choice alone. Where it chooses
among groups of experts first, that choice is answered with the groups of the given experts.

Routers are found by running the network once. Whether an answer changes what it should, and nothing else, is measured
at the start (`slipstream.learner.model.policy`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from slipstream.learner.feed.recorded_experts import RoutedLayers

_TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True)
class Router:
    """A module that chooses experts.

    Attributes:
        module: Its name in the network.
        layer: Number of its layer, the first number in that name.
        experts: How many there are, of which it chooses `top_k`.
        groups: Of experts, that it chooses among first; 0 if it does not.
    """

    module: str
    layer: int
    experts: int
    top_k: int
    groups: int


class UnknownRouters(ValueError):
    """The network's routers choose in a way that is not known here. The text says which."""


class RouterReplay:
    """Holds the routers of a network, one for each layer that is a mixture, in the order of the layers.

    Args:
        network: The network; its routers' `forward` is replaced.
        run: Runs the network over `tokens` tokens.
        sizes: Numbers of experts that the network's config names.

    Raises:
        UnknownRouters: It has none that are known.
    """

    def __init__(self, network: torch.nn.Module, run: Callable[[], object], tokens: int, sizes: set[int]) -> None:
        calls = _calls(network, run)
        self.routers = _routers(calls, tokens, sizes)
        self._given: torch.Tensor | None = None
        self._own: dict[int, torch.Tensor] | None = None
        for place, router in enumerate(self.routers):
            module: Any = network.get_submodule(router.module)
            module.forward = torch.compiler.disable(self._answered(module.forward, place))  # type: ignore[no-untyped-call]

    @property
    def routed(self) -> RoutedLayers:
        """The layers whose routers these are."""
        first = self.routers[0]
        return RoutedLayers(tuple(router.layer for router in self.routers), first.experts, first.top_k)

    @contextmanager
    def choosing(self, given: torch.Tensor | None) -> Iterator[None]:
        """Have the routers choose the given experts inside the `with`.

        Args:
            given: int16 [n, layers, top_k], for the n tokens that the network is run over, in their order; -1 where the
                router chooses for itself. None: it does for all tokens.
        """
        before, self._given = self._given, given
        try:
            yield
        finally:
            self._given = before

    @contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:
        """Collect what the routers choose inside the `with`: afterwards the list has an int64 [n, top_k] for each."""
        found: list[torch.Tensor] = []
        self._own = {}
        try:
            yield found
            found += [self._own[place] for place in range(len(self.routers))]
        finally:
            self._own = None

    def again(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what wraps a layer's forward pass, and what wraps its recomputation in the backward pass: its routers
        choose the same again."""
        return nullcontext(), self.choosing(self._given)

    def _answered(self, forward: Callable[..., Any], place: int) -> Callable[..., Any]:
        @wraps(forward)
        def answered(*args: Any, **kwargs: Any) -> Any:
            if self._given is None and self._own is None:
                return forward(*args, **kwargs)
            given = None if self._given is None else self._given[:, place]
            with _Answers(self.routers[place], given, place, self._own):
                return forward(*args, **kwargs)

        return answered


class _Answers(TorchFunctionMode):
    """Answers one router's calls of `topk`."""

    def __init__(
        self, router: Router, given: torch.Tensor | None, place: int, own: dict[int, torch.Tensor] | None
    ) -> None:
        super().__init__()
        self._router, self._place, self._own = router, place, own
        self._given = None if given is None else given.long()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores, k = _arguments(args, kwargs)
        chosen = func(*args, **kwargs)
        router, tokens = self._router, scores.numel() // scores.shape[-1]
        if (scores.shape[-1], k) == (router.experts, router.top_k):
            if self._given is not None and tokens == len(self._given):
                ids = self._given.to(scores.device).view(chosen.indices.shape)
                ids = torch.where(ids < 0, chosen.indices, ids)
                chosen = torch.return_types.topk((scores.gather(-1, ids), ids))
            if self._own is not None:
                self._own[self._place] = chosen.indices.reshape(tokens, k)
        elif self._given is not None and scores.shape[-1] == router.groups and tokens == len(self._given):
            groups = self._given.to(scores.device).clamp(min=0) // (router.experts // router.groups)
            known = (self._given >= 0).to(scores.device).any(-1, keepdim=True)
            wanted = torch.zeros(tokens, router.groups, dtype=torch.bool, device=scores.device)
            wanted = wanted.scatter(-1, groups, known.expand(groups.shape)).view(scores.shape)
            first = torch.where(wanted, torch.inf, scores)
            ids = torch.topk(first, k, dim=-1).indices
            chosen = torch.return_types.topk((scores.gather(-1, ids), ids))
        return chosen


@dataclass(frozen=True)
class _Call:
    """A call of `topk` over `rows` rows of `width` scores, inside a module."""

    module: str
    rows: int
    width: int
    k: int


class _Calls(TorchFunctionMode):
    def __init__(self, inside: Sequence[str]) -> None:
        super().__init__()
        self._inside, self.found = inside, list[_Call]()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK and self._inside:
            scores, k = _arguments(args, kwargs)
            width = scores.shape[-1]
            self.found.append(_Call(self._inside[-1], scores.numel() // width, width, k))
        return func(*args, **kwargs)


def _arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return scores and k of a call of `topk`."""
    return args[0] if args else kwargs["input"], int(args[1] if len(args) > 1 else kwargs["k"])


def _calls(network: torch.nn.Module, run: Callable[[], object]) -> list[_Call]:
    """Run the network and return its calls of `topk`, each with the innermost module that makes it."""
    names = {module: name for name, module in network.named_modules()}
    inside: list[str] = []

    def enter(module: torch.nn.Module, given: object) -> None:
        if module in names:
            inside.append(names[module])

    def leave(module: torch.nn.Module, given: object, result: object) -> None:
        if module in names:
            inside.pop()

    calls = _Calls(inside)
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with torch.no_grad(), calls:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls.found


def _routers(calls: Sequence[_Call], tokens: int, sizes: set[int]) -> list[Router]:
    """Find the routers among calls of `topk` by a network that was run over `tokens` tokens."""
    over_tokens = sorted((call for call in calls if call.rows == tokens), key=lambda call: -call.width)
    found: dict[int, Router] = {}
    for call in over_tokens:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", call.module)
        if call.width not in sizes or number is None:
            continue
        router = Router(call.module, int(number[1]), call.width, call.k, _groups(call, over_tokens))
        if found.setdefault(router.layer, router).module != router.module:
            raise UnknownRouters(f"layer {router.layer} chooses experts more than once")
    if not found:
        raise UnknownRouters("no layer chooses experts by torch.topk over their scores")
    if len({(router.experts, router.top_k) for router in found.values()}) > 1:
        raise UnknownRouters("its layers have different numbers of experts")
    return [found[layer] for layer in sorted(found)]


def _groups(choice: _Call, calls: Sequence[_Call]) -> int:
    widths = [call.width for call in calls if call.module == choice.module and call.width < choice.width]
    return next((width for width in widths if choice.width % width == 0), 0)
