"""Reading and changing values of a model while it runs, in any layout.

Hooks are on modules, by canonical names. A forward that is computed again for its backward is not seen twice. A model
that is compiled runs eagerly meanwhile: a hook in a compiled block would run while it is traced, and never again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forge_core.config.builder import load_reference
from forge_core.errors import ConfigError, PluginError
from forge_plugins_interp.placement import own_part, with_gradient
from forge_plugins_interp.sites import PlacedSite

Take = Callable[[PlacedSite, torch.Tensor], None]
"""Is given this rank's part of a site's value, as the model has it, connected to its graph."""
Change = Callable[[torch.Tensor], torch.Tensor]
"""From the whole value of a site to another one of the same shape and dtype."""
Hook = Callable[[torch.Tensor], torch.Tensor | None]


@contextmanager
def observe(sites: Sequence[PlacedSite], take: Take) -> Iterator[None]:
    """Give ``take`` the value of each site once a forward, until the context ends.

    All ranks that share a model observe the same sites of it, and run the same forwards.
    """

    def watching(site: PlacedSite) -> Callable[[torch.Tensor], None]:
        def see(value: torch.Tensor) -> None:
            if not _is_recomputing():
                take(site, value)

        return see

    with _hooked([(site, watching(site)) for site in sites]):
        yield


@contextmanager
def intervene(changes: Sequence[tuple[PlacedSite, Change]]) -> Iterator[None]:
    """Put ``change`` of the value in the place of each site's value, until the context ends.

    Of several changes of one site, each is given what the one before made. A forward that is computed again for its
    backward is changed in the same way, and so ``change`` must be a function of the value alone.

    Raises:
        ConfigError: at once, a site cannot be changed; in a forward, a value has another shape.
    """

    for site, _ in changes:
        if site.site.compute and not site.site.replace:
            raise ConfigError(f"site {site.name}: it is computed for whoever looks at it, and cannot be changed")

    def changing(site: PlacedSite, change: Change) -> Callable[[torch.Tensor], torch.Tensor]:
        def put(value: torch.Tensor) -> torch.Tensor:
            known = with_gradient(value, site.cuts)
            changed = change(known)
            if changed.shape != known.shape:
                raise ConfigError(f"site {site.name}: a value of shape {_shape(changed)} for one of {_shape(known)}")
            return own_part(changed, site.cuts).to(value.dtype)

        return put

    with _hooked([(site, changing(site, change)) for site, change in changes]):
        yield


@contextmanager
def _hooked(hooks: Sequence[tuple[PlacedSite, Hook]]) -> Iterator[None]:
    with ExitStack() as stack:
        if any(site.is_compiled for site, _ in hooks):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for batch in {site.batch for site, _ in hooks if site.batch is not None}:
            stack.enter_context(batch.watched())
        for site, hook in hooks:
            register = _hook_computed if site.site.compute else _hook_module
            stack.callback(register(site, hook).remove)
        yield


def _hook_module(placed: PlacedSite, hook: Hook) -> RemovableHandle:
    """On a tensor that a module is given or gives."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args or not kwargs:
            changed = hook(_tensor(placed, args))
            return None if changed is None else (_replaced(args, placed.site.argument, changed), kwargs)
        names = [*kwargs]
        changed = hook(_tensor(placed, tuple(kwargs.values())))
        return None if changed is None else (args, {**kwargs, names[placed.site.argument]: changed})

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return hook(_named(placed, output))
        changed = hook(_tensor(placed, output))
        return None if changed is None else _replaced(output, placed.site.argument, changed)

    if placed.site.where == "input":
        return placed.module.register_forward_pre_hook(before, with_kwargs=True)
    return placed.module.register_forward_hook(after)


def _hook_computed(placed: PlacedSite, hook: Hook) -> RemovableHandle:
    """On a tensor that is computed from what a module is given. A change of it changes what the module gives."""
    site = placed.site
    compute = _function(placed, site.compute)
    replace = _function(placed, site.replace) if site.replace else None
    own = {"part": functools.partial(own_part, cuts=placed.beyond_argument)} if site.where == "output" else {}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        try:
            computed = compute(module, *args, **kwargs, **site.options)
        except ConfigError as error:
            raise ConfigError(f"site {placed.name}: {error}") from error
        changed = hook(computed)
        if changed is None:
            return None
        assert replace is not None, "refused before"
        return replace(module, changed, *args, **kwargs, **site.options, **own)

    return placed.module.register_forward_hook(after, with_kwargs=True)


def _function(placed: PlacedSite, reference: str) -> Any:
    return load_reference(reference, what=f"the function of site {placed.name}", owner=reference.partition(".")[0])


def _tensor(placed: PlacedSite, values: Any) -> torch.Tensor:
    index = placed.site.argument
    if isinstance(values, tuple) and len(values) > index and isinstance(values[index], torch.Tensor):
        return _named(placed, values[index])
    where = f"{placed.site.where} {index} of {type(placed.module).__qualname__}"
    if placed.batch is not None:
        raise ConfigError(f"site {placed.name}: {where} is no tensor, and cannot be read by the name of its module")
    raise PluginError(f"the model declares that {placed.name} is {where}, and no tensor is there")


def _named(placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
    """The value; the site learns the names of its dimensions, if the model declares none."""
    if placed.batch is not None:
        dims = placed.batch.dims(placed.name, value, placed.cuts)
        placed.site = attrs.evolve(placed.site, dims=dims)
    return value


def _replaced(values: tuple[Any, ...], index: int, value: torch.Tensor) -> tuple[Any, ...]:
    replaced = (*values[:index], value, *values[index + 1 :])
    return type(values)._make(replaced) if hasattr(values, "_make") else replaced


def _is_recomputing() -> bool:
    """Return whether this forward runs within a backward."""
    return torch._C._current_graph_task_id() != -1


def _shape(tensor: torch.Tensor) -> str:
    return " × ".join(map(str, tensor.shape))
