"""Descriptions of components that a plugin registers, made of strings, so that listing them imports nothing.

Import paths come in three tiers. The module that holds these descriptions (``plugin.py``) is imported by every
command; the config class by ``forge validate``; the factory by ``forge run``. Only the last may import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs.validators import deep_iterable

DOC = "forge_doc"
"""The entry of a field's metadata that describes it, where no docstring stands under it."""

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_REFERENCE = re.compile(_MODULE.pattern + r":[A-Za-z_]\w*")


def _is_name(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    # some are empty if they are not given
    if value != attribute.default and (not isinstance(value, str) or not _NAME.fullmatch(value)):
        raise ValueError(f"{attribute.name} must be lower-case words joined by '_' or '-', got {value!r}")


def _is_reference(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value != attribute.default and (not isinstance(value, str) or not _REFERENCE.fullmatch(value)):
        raise ValueError(f'{attribute.name} must be an import path "package.module:Name", got {value!r}')


def _is_summary(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 100 or "\n" in value:
        raise ValueError(f"{attribute.name} must be one line of 1 to 100 characters, got {value!r}")


def _is_text(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{attribute.name} must be a sentence, got {value!r}")


def _is_module(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not isinstance(value, str) or not _MODULE.fullmatch(value):
        raise ValueError(f"{attribute.name} must be names as import has them, got {value!r}")


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, str):  # aliases = "x" would otherwise become ("x",) letter by letter
        raise ValueError(f"expected a sequence of names, got the string {values!r}")
    return tuple(values)


def _names(values: Iterable[str]) -> tuple[str, ...]:
    """Same as ``_tuple``. mypy takes the types of a constructor from converters, where it knows no type variables."""
    return _tuple(values)


@attrs.frozen(kw_only=True)
class Component:
    """One named implementation of a kind.

    Raises:
        ValueError: from the constructor, for a malformed name, summary or import path; discovery reports it as an
            error of the plugin.
    """

    name: str = attrs.field(validator=_is_name)
    """The name that people write in ``name = "…"``."""
    summary: str = attrs.field(validator=_is_summary)
    """One line for ``forge plugins`` and for error messages."""
    factory: str = attrs.field(validator=_is_reference)
    """``"package.module:callable"``; its signature is the kind's protocol in ``forge_core.contracts``."""
    config: str = attrs.field(default="", validator=_is_reference)
    """``"package.module:Class"``, a frozen attrs class; the module may not import torch. Without it, the keys are the
    keyword-only parameters of the factory that its kind is not given."""
    kind: str = attrs.field(default="", validator=_is_name)
    """The kind, of an entry of the list ``components`` of a plugin module; the hook says it of what it yields."""
    aliases: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=deep_iterable(_is_name))
    """Further names that resolve to this component."""
    deprecated: str = attrs.field(default="", validator=_is_text)
    """If not empty: a sentence that says what to use instead, printed whenever the component is chosen."""
    modules: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=deep_iterable(_is_module))
    """Importable modules that the factory needs beyond the plugin's own dependencies (optional extras)."""


Conditions = Mapping[str, tuple[Any, ...]]
"""Keys of a config, each with the values that are meant."""
Settings = Mapping[str, Any]
"""Keys of a config, each with its value."""


def _conditions(given: Mapping[str, Any]) -> Conditions:
    return {key: value if isinstance(value, tuple) else (value,) for key, value in given.items()}


@attrs.frozen
class Conflict:
    """A combination that a pass refuses, and why: another pass, a mesh axis, or a setting of another section.

    All that hold in a job are reported at validation. Arithmetic (what divides what) belongs into the config's
    ``check``.

    Raises:
        ValueError: from the constructor, for a combination of fields that means nothing.
    """

    other: str
    """The name of the other pass; or ``"parallel.tp"`` for an axis of more than one rank; or the key of any other
    setting, such as ``"train.precision"``, with the ``values`` of it that are meant."""
    reason: str
    """A sentence that stands after a colon; it is printed by validation and in the generated documentation."""
    when: Conditions = attrs.field(factory=dict, converter=_conditions, kw_only=True, hash=False)
    """Own keys, each with a value or a tuple of values: ``{"schedule": ("GPipe", "1F1B")}``. There is a conflict only
    where each key has one of its values. The first key is the one that the message is about."""
    other_when: Conditions = attrs.field(factory=dict, converter=_conditions, kw_only=True, hash=False)
    """The same for keys of the other pass."""
    values: tuple[Any, ...] = attrs.field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        section, dot, _ = self.other.partition(".")
        if not dot:
            _is_name(None, attrs.fields(Conflict).other, self.other)
        if self.other_when and dot:
            raise ValueError(f"other_when is for keys of another pass, and {self.other!r} is none; give its values")
        if bool(self.values) is not (bool(dot) and section != "parallel"):
            raise ValueError(f"values must be given for settings that are no axis, and only for them: {self.other!r}")


@attrs.frozen
class Need:
    """A pass without which another one, or a value of one of its keys, has no meaning."""

    other: str = attrs.field(validator=_is_name)
    """The name of the pass that is needed."""
    reason: str = ""
    """Same as in ``Conflict``."""
    when: Conditions = attrs.field(factory=dict, converter=_conditions, kw_only=True, hash=False)
    """Same as in ``Conflict``."""


def _conflicts(values: Iterable[Conflict]) -> tuple[Conflict, ...]:
    return _tuple(values)


def _needs(values: Iterable[str | Need]) -> tuple[Need, ...]:
    return tuple(Need(value) if isinstance(value, str) else value for value in _tuple(values))


PHASES: Mapping[str, str] = {
    "split": "a pipeline stage is a smaller model, and everything after it works on one stage",
    "shard": "tensor, sequence, context: before anything replaces the linear layers that the plan names",
    "experts": "after shard has left the expert weights alone, before they can be swapped for quantised ones",
    "swap": "fp8, adapters: sees the final linear layers, and comes before wrappers that hide them",
    "checkpointing": "wraps what will be recomputed, so that compile can see both and fuse across",
    "compile": "before fsdp, so that gathering and freeing parameters stay outside of the compiled graphs",
    "fsdp": "last: it takes ownership of parameters, which may not be replaced afterwards",
}
"""The phases in the order in which passes change a model, and why each stands where it does."""


def _trades_memory(component: PassComponent, _: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    if value and component.phase != "checkpointing":
        raise ValueError(f"compared is for passes of the phase checkpointing, and this one is of {component.phase!r}")


@attrs.frozen(kw_only=True)
class PassComponent(Component):
    """A component of the kind ``parallel_pass``. Where it stands among other passes is declared here, as data."""

    phase: str = attrs.field(validator=attrs.validators.in_(PHASES))
    after: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=deep_iterable(_is_name))
    """Passes of the same phase that must come first, if they are there."""
    before: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=deep_iterable(_is_name))
    """Passes of the same phase that must come later, if they are there."""
    needs: tuple[Need, ...] = attrs.field(default=(), converter=_needs)
    """Passes without which this one has no meaning, by name or as a ``Need``. Passes that all values of its keys
    need are added with it; what one value of a key needs must be in the job."""
    conflicts: tuple[Conflict, ...] = attrs.field(default=(), converter=_conflicts)
    compared: tuple[Settings, ...] = attrs.field(default=(), converter=_tuple, validator=_trades_memory, hash=False)
    """Settings of its keys whose memory ``forge plan`` compares with the job's: ``({"mode": "full"},)``. Of the phase
    ``checkpointing`` only; each stands in place of all that the job has of it."""
    adds_parameters: bool = False
    """It is an ``AddingPass``: the model's weights mean something else with it. A resume may not change its keys."""
    serves: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=deep_iterable(_is_name))
    """Mesh axes that this pass makes use of (``dp_shard``, ``tp``, …), and ``"precision"`` if it computes in
    bf16 with parameters in fp32. An axis above 1 is resolved to the one installed pass that serves it, as a name is."""


def _is_description(_: object, attribute: attrs.Attribute[type[Component]], value: type[Component]) -> None:
    if not (isinstance(value, type) and issubclass(value, Component)):
        raise ValueError(f"{attribute.name} must be Component, or a class that extends it, got {value!r}")


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
    descriptor: type[Component] = attrs.field(default=Component, validator=_is_description)
    returns: str = attrs.field(default="", validator=_is_reference)
    """``"package.module:Class"``, of which a factory must return an instance; empty if there is no such class."""
    optional: tuple[str, ...] = attrs.field(default=(), converter=_names, validator=deep_iterable(_is_name))
    """Keywords that only those factories are given which take them."""


@attrs.frozen(kw_only=True)
class Command:
    """A sub-command of ``forge``. A core command cannot be replaced."""

    name: str = attrs.field(validator=_is_name)
    summary: str = attrs.field(validator=_is_summary)
    run: str = attrs.field(validator=_is_reference)
    """``"package.module:command"``, a ``click.Command`` or ``click.Group``, imported when it is called."""
    ranks: bool = False
    """The command has the option ``--nproc``, and goes on as several ranks where it calls
    ``Invocation.start_ranks``."""


@attrs.frozen(kw_only=True)
class Check:
    """Something that ``forge doctor`` looks at."""

    name: str = attrs.field(validator=_is_name)
    summary: str = attrs.field(validator=_is_summary)
    run: str = attrs.field(validator=_is_reference)
    """``"package.module:function"``, a ``CheckFunction`` of ``forge_core.contracts.check``. It may import torch."""
    writes: str | None = attrs.field(default=None, validator=_is_reference)
    """``"package.module:function"``, a ``WriteFacts``: gives a file of facts about this machine for
    ``forge doctor --init`` to write."""


@attrs.frozen
class Slot:
    """Marks a config field as a choice of component: ``router: Annotated[Use, Slot("router")]``.

    In TOML the field is a table with the key ``name`` and the component's own keys, or just the name as a string.
    ``Annotated[Use | None, Slot("router")] = None`` makes the choice optional; ``Slot("loss", default="…")`` on a
    required field says which name an absent table stands for. With ``text_key="url"``, a string is the value of that
    key of the component ``default``, and no name.
    """

    kind: str
    default: str | None = None
    text_key: str | None = None


def kind_words(kind: str) -> str:
    """A kind's name as a sentence has it: ``"data source"``."""
    return kind.replace("_", " ")
