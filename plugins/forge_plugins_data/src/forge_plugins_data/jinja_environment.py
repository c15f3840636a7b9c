"""Jinja as ``transformers`` sets it up for chat templates, in a sandbox. A template is code that somebody publishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import TemplateError as TemplateError
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template raises: ``raise_exception`` of its own, or expressions that do not fit the messages."""
WRITTEN, MARKS = "_written", "_marks"
"""Variables of a rendering: the list of its parts so far, and a list for the marks of ``{% generation %}``."""


def chat_environment() -> ImmutableSandboxedEnvironment:
    """The environment that compiles chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "namespace": _Namespace, "dict": _dict}
    return environment


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: text that the model is to write."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_context
    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        text = caller()
        start = sum(map(len, context[WRITTEN]))
        context[MARKS].append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """A namespace that keeps no names of Python's own."""

    def __init__(*args: Any, **keys: Any) -> None:
        Namespace.__init__(*args, **keys)
        for name in dict(*args[1:], **keys):
            _refuse_internal(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


def _refuse_internal(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


def _dict(*items: Any, **keys: Any) -> dict[Any, Any]:  # a function, which has less to get hold of than the class
    return dict(*items, **keys)


def _to_json(value: Any, ensure_ascii: bool = False, **keys: Any) -> str:  # not jinja's, which escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, **keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
