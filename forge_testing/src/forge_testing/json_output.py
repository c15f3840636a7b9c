"""What a command prints as JSON is what its class says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import click

from forge_core.cli import forge, main
from forge_core.commands.invocation import Invocation
from forge_core.commands.json_output import JsonOption
from forge_core.config.builder import load_reference


def json_of(*arguments: str, code: int = 0) -> Any:
    """Run ``forge`` with these arguments and ``--json``, and return what it has printed, read; of a command that prints
    lines of JSON, a list of them.

    Args:
        code: the exit code that is expected.

    Raises:
        AssertionError: another exit code; or stdout is not JSON alone, or not what the command's class says.
    """
    option = json_option_of(_command_of(arguments))
    assert option is not None, f"forge {' '.join(arguments)} has no --json"
    with redirect_stdout(io.StringIO()) as printed:
        found = main([*arguments, "--json"])
    assert found == code, f"the exit code is {found}, and {code} was expected"
    return check_json(printed.getvalue(), option)


def _command_of(words: Sequence[str]) -> click.Command:
    command: click.Command = forge
    context = click.Context(forge, obj=Invocation())
    for word in words:
        inner = command.get_command(context, word) if isinstance(command, click.Group) else None
        if inner is None:
            break
        command = inner
    return command


def json_option_of(command: click.Command) -> JsonOption | None:
    """The option ``--json`` of a command, if it has one."""
    return next((option for option in command.params if isinstance(option, JsonOption)), None)


def printed_type(option: JsonOption) -> Any:
    """The type of what is printed; its module is imported here, if the option names it by its path."""
    is_path = isinstance(option.prints, str)
    return load_reference(option.prints, what="the class of --json", owner="it") if is_path else option.prints


def check_json(printed: str, option: JsonOption) -> Any:
    """What a command has printed to stdout, read.

    Raises:
        AssertionError: it is not JSON alone, or not what ``option`` says.
    """
    try:
        texts = printed.splitlines() if option.lines else [printed]
        values = [json.loads(text, parse_constant=_refuse) for text in texts]
    except ValueError as error:
        raise AssertionError(f"stdout is not JSON alone: {error}; it is {printed[:200]!r}") from None
    for value in values:
        wrong = [*misfits(value, printed_type(option))]
        assert not wrong, f"what is printed is not what the class of --json says: {'; '.join(wrong[:5])}"
    return values if option.lines else values[0]


def misfits(value: Any, annotation: Any, at: str = "") -> Iterator[str]:
    """Where JSON, as read, differs from a type: keys that are missing or not declared, values of another kind.

    A number may be null: it is not finite.
    """
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        yield from min(([*misfits(value, one, at)] for one in arguments), key=len)
    elif attrs.has(origin):
        yield from _misfits_of_object(value, origin, at)
    elif origin is Literal:
        yield from [] if value in arguments else _differs(value, at, f"one of {arguments}")
    elif isinstance(origin, type) and issubclass(origin, (Mapping, Sequence)) and origin is not str:
        yield from _misfits_of_items(value, origin, arguments, at)
    elif origin is not Any and type(value) not in _READ_AS.get(origin, (str,)):
        yield from _differs(value, at, getattr(origin, "__name__", str(origin)))


_READ_AS: Mapping[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int, NoneType),
    NoneType: (NoneType,),
}
"""What JSON is read as; anything else is text."""


def _misfits_of_items(value: Any, container: type, arguments: Sequence[Any], at: str) -> Iterator[str]:
    if issubclass(container, Mapping) and isinstance(value, dict):
        for key, item in value.items():
            yield from misfits(item, arguments[1] if arguments else Any, f"{at}.{key}")
    elif issubclass(container, Sequence) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from misfits(item, _of_item(arguments, index), f"{at}[{index}]")
    else:
        yield from _differs(value, at, "an object" if issubclass(container, Mapping) else "an array")


def _of_item(arguments: Sequence[Any], index: int) -> Any:
    """The type of an item of ``Sequence[X]``, ``tuple[X, ...]`` or ``tuple[X, Y]``."""
    if not arguments:
        return Any
    return arguments[index] if len(arguments) > 1 and Ellipsis not in arguments else arguments[0]


def _misfits_of_object(value: Any, cls: type, at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield from _differs(value, at, f"an object of {cls.__name__}")
        return
    fields = {field.name: field.type for field in attrs.fields(attrs.resolve_types(cls))}
    for name in fields.keys() - value.keys():
        yield f"{at}.{name} is missing"
    for name in value.keys() - fields.keys():
        yield f"{at}.{name} is not declared in {cls.__name__}"
    for name in fields.keys() & value.keys():
        yield from misfits(value[name], fields[name], f"{at}.{name}")


def _differs(value: Any, at: str, expected: str) -> Iterator[str]:
    yield f"{at or 'it'} is {value!r:.80}, not {expected}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
