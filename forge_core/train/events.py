"""The events of a run, and the callbacks that the job names for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import iscoroutinefunction, isfunction, signature
from typing import Any, cast

import pluggy

from forge_core.contracts.callback import Callback
from forge_core.contracts.observer import Observer
from forge_core.errors import PluginError, nearest, noting

_NO_EVENTS = ("state", "load_state", "tensors")
"""Methods of a callback that are asked for its state."""


def _events_of(contract: type[Callback]) -> tuple[str, ...]:
    """The base class is the specification: its own methods are the events."""
    methods = (name for name, one in vars(contract).items() if isfunction(one) and not name.startswith("_"))
    return tuple(name for name in methods if name not in _NO_EVENTS)


EVENTS = _events_of(Callback)
OBSERVED = _events_of(Observer)
"""Events that only observers hear of."""


class Events:
    """Calls the callbacks that override an event, in the order given. Each has a name of its own.

    pluggy checks the callbacks and lets each take the arguments it wants; who listens is looked up once, so that an
    event without listeners is an empty loop.
    """

    calling = ""
    """The callback that is being called, and its event; for other threads to read."""

    def __init__(self, callbacks: Sequence[tuple[str, Callback]]) -> None:
        manager = _CallbackManager("forge_lifecycle")
        manager.add_hookspecs(Observer)
        for name, callback in reversed(callbacks):  # pluggy calls the last one first
            for event in EVENTS:
                if iscoroutinefunction(getattr(callback, event, None)):
                    raise PluginError(f"{name}: {event} is async; nothing awaits it. This is a bug in the callback.")
            try:
                manager.register(callback, name=name)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"{name}: {error}. This is a bug in the callback.") from error
        self._listeners: dict[str, list[tuple[str, Callable[..., None], tuple[str, ...]]]] = {
            event: [
                (implementation.plugin_name, implementation.function, implementation.argnames)
                for implementation in reversed(getattr(manager.hook, event).get_hookimpls())
            ]
            for event in (*EVENTS, *OBSERVED)
        }

    def listens(self, event: str) -> bool:
        return bool(self._listeners[event])

    def call(self, event: str, **given: Any) -> list[Any]:
        """Returns what each listener returns. Raises what a callback raises, with a note that names it."""
        answers: list[Any] = []
        outer = self.calling
        for name, function, wanted in self._listeners[event]:
            self.calling = f"{name}, {event}"
            with noting(f"raised by {name} in {event}", ours=True):
                answers.append(function(*(given[argument] for argument in wanted)))
        self.calling = outer
        return answers

    def call_failed(self, log: Callable[[str], None], **given: Any) -> None:
        """``run_failed``: a callback that fails here must not hide why the run failed."""
        for name, function, wanted in self._listeners["run_failed"]:
            try:
                function(*(given[argument] for argument in wanted))
            except Exception as error:  # noqa: BLE001 - the run's own error is being raised
                log(f"{name} failed in run_failed: {type(error).__name__}: {error}")


def mistaken_events(callbacks: Iterable[tuple[str, Callback]]) -> Iterator[str]:
    """A sentence for each method that nothing calls, and whose name and arguments are almost those of an event."""
    known = {name: getattr(Callback, name) for name in (*EVENTS, *_NO_EVENTS)}
    for owner, callback in callbacks:
        own = {
            name: one for cls in reversed(type(callback).__mro__) for name, one in vars(cls).items() if isfunction(one)
        }
        called = {name for one in own.values() for name in one.__code__.co_names}
        for name in (name for name in own if name[0] != "_" and name not in {*known, *called}):
            near = nearest(name, known, 0.8)
            if near and set(signature(own[name]).parameters) <= set(signature(known[near]).parameters):
                yield f"{owner}: nothing calls its method {name}; did you mean {near}?"


class _CallbackManager(pluggy.PluginManager):
    """Methods that override those of ``Callback`` are hook implementations; no decorator is needed, nor any option."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        events = (*EVENTS, *OBSERVED) if isinstance(plugin, Observer) else EVENTS
        if name not in events or getattr(type(plugin), name, None) is getattr(Observer, name):
            return None
        return cast("pluggy.HookimplOpts", {})  # pluggy fills in the defaults

    def parse_hookspec_opts(self, module_or_class: object, name: str) -> pluggy.HookspecOpts | None:
        return cast("pluggy.HookspecOpts", {}) if name in (*EVENTS, *OBSERVED) else None
