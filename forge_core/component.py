"""What a plugin registers: descriptions made of strings, so that listing them imports nothing.

Import paths come in three tiers. The module that holds these descriptions (``plugin.py``) is imported by every
command; the config class by ``forge validate``; the factory by ``forge run``. Only the last may import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import attrs

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _is_name(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{attribute.name} must be lower-case words joined by '_' or '-', got {value!r}")


def _is_reference(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise ValueError(f'{attribute.name} must be an import path "package.module:Name", got {value!r}')


def _is_summary(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 100 or "\n" in value:
        raise ValueError(f"{attribute.name} must be one line of 1 to 100 characters, got {value!r}")


def _are_names(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for name in value:
        _is_name(None, attribute, name)  # type: ignore[arg-type]  # only the attribute's name is used


T = TypeVar("T")


def _tuple(values: Iterable[T]) -> tuple[T, ...]:
    if isinstance(values, str):  # aliases = "x" would otherwise become ("x",) letter by letter
        raise ValueError(f"expected a sequence of names, got the string {values!r}")
    return tuple(values)


@attrs.frozen(kw_only=True)
class Component:
    """One named implementation of a kind.

    Raises:
        ValueError: from the constructor, for a malformed name, summary or import path; discovery reports it as an
            error of the plugin.
    """

    name: str = attrs.field(validator=_is_name)
    """What people write in ``name = "…"``."""
    summary: str = attrs.field(validator=_is_summary)
    """One line for ``forge plugins`` and for error messages."""
    factory: str = attrs.field(validator=_is_reference)
    """``"package.module:callable"``; its signature is the kind's protocol in ``forge_core.contracts``."""
    config: str = attrs.field(validator=_is_reference)
    """``"package.module:Class"``, a frozen attrs class; the module may not import torch."""
    aliases: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_are_names)
    """Further names that resolve to this component."""
    deprecated: str = ""
    """If not empty: a sentence that says what to use instead, printed whenever the component is chosen."""
    modules: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """Importable modules that the factory needs beyond the plugin's own dependencies (optional extras)."""


@attrs.frozen
class Conflict:
    """Two passes that cannot be applied to one model, and why."""

    other: str
    """The name of the other pass."""
    reason: str
    """A sentence; it is printed by validation and in the generated documentation."""


PHASES = ("split", "shard", "experts", "swap", "checkpointing", "compile", "fsdp")
"""The order in which passes change a model. Why it is the only one:

* ``split`` first: a pipeline stage is a smaller model, and everything after it works on one stage;
* ``shard`` (tensor, sequence, context) before anything replaces the linear layers that the plan names;
* ``experts`` after ``shard`` has left the expert weights alone, before they can be swapped for quantised ones;
* ``swap`` (fp8, adapters) sees the final linear layers, and comes before wrappers that hide them;
* ``checkpointing`` wraps what will be recomputed, so that ``compile`` can see both and fuse across;
* ``compile`` before ``fsdp``, so that gathering and freeing parameters stay outside the compiled graphs;
* ``fsdp`` last: it takes ownership of parameters, which nobody may replace afterwards.
"""


@attrs.frozen(kw_only=True)
class PassComponent(Component):
    """A component of the kind ``parallel_pass``. Where it stands among other passes is declared here, as data."""

    phase: str = attrs.field(validator=attrs.validators.in_(PHASES))
    after: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_are_names)
    """Passes of the same phase that must come first, if they are there."""
    before: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_are_names)
    """Passes of the same phase that must come later, if they are there."""
    needs: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_are_names)
    """Passes without which this one has no meaning."""
    conflicts: tuple[Conflict, ...] = attrs.field(default=(), converter=_tuple)
    serves: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_are_names)
    """Mesh axes that this pass makes use of (``dp_shard``, ``tp``, …), and ``"precision"`` if it computes in
    ``train.precision``. An axis above 1 is resolved to the one installed pass that serves it, as a name is."""


@attrs.frozen(kw_only=True)
class Kind:
    """An extension point. Plugins add kinds of their own with the hook ``forge_kinds``."""

    name: str = attrs.field(validator=_is_name)
    """Singular, as in messages: ``vision_encoder``."""
    hook: str = attrs.field(validator=attrs.validators.matches_re(r"forge_[a-z_]+"))
    """The hook that yields components of this kind: ``forge_vision_encoders``."""
    summary: str = attrs.field(validator=_is_summary)
    contract: str = attrs.field(validator=_is_reference)
    """``"package.module:Class"``: the protocol of what a factory returns, for the documentation and the kit."""
    descriptor: type[Component] = Component


@attrs.frozen(kw_only=True)
class Command:
    """A sub-command of ``forge``. A core command cannot be replaced."""

    name: str = attrs.field(validator=_is_name)
    summary: str = attrs.field(validator=_is_summary)
    run: str = attrs.field(validator=_is_reference)
    """``"package.module:command"``, a ``click.Command`` or ``click.Group``, imported when it is called."""


@attrs.frozen
class Slot:
    """Marks a config field as a choice of component: ``router: Annotated[Use, Slot("router")]``.

    In TOML the field is a table with the key ``name`` and the component's own keys, or just the name as a string.
    ``Annotated[Use | None, Slot("router")] = None`` makes the choice optional; ``Slot("loss", default="…")`` on a
    required field says which name an absent table stands for.
    """

    kind: str
    default: str | None = None


@attrs.frozen(kw_only=True)
class Use:
    """A resolved choice of component: which one, from which distribution, with which configuration.

    Build it with the ``Builder`` that the factory of the surrounding component is given.
    """

    kind: str
    name: str
    provider: str
    """The distribution that registered the component."""
    factory: str
    config: Any
    """An instance of the component's config class."""

    @property
    def qualified_name(self) -> str:
        """``"distribution:name"``, unambiguous whatever else is installed."""
        return f"{self.provider}:{self.name}"
