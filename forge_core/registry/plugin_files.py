"""Plugins in a file: one Python file that a job names, without a package. A resolved job holds its text.

So the text goes wherever the job goes: to all ranks, which compare it, into the run's directory and every checkpoint.
Text is run only if it is trusted: read from a file that a configuration names, or allowed by ``--trust-files``.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any, TypeVar

from forge_core.errors import ConfigError, did_you_mean
from forge_core.registry.catalog import Catalog, Plugin
from forge_core.registry.component import Component, Kind, kind_words
from forge_core.registry.imports import HEAVY_MODULES
from forge_core.registry.plugin_output import output_of

PROVIDER = "file:"
"""How the distribution of a component of a file begins: ``file:my_router.py``."""
TRUST_VARIABLE = "FORGE_TRUST_FILES"
"""Environment variable: SHA-256 of each text that this process and those it starts may run, or ``all``."""

T = TypeVar("T", bound=Callable[..., Any])


def component(
    kind: str,
    *,
    name: str = "",
    summary: str = "",
    example: Mapping[str, Any] | None = None,
    checks: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[[T], T]:
    """Decorate a class or a function of a plugin file: it is the factory of a component.

    Its keys are the keyword-only parameters that its kind is not given.

    Args:
        kind: such as ``"router"``.
        name: by default, that of the class or function in lower case, with underscores.
        summary: by default, the first line of its docstring.
        example: values of keys, with which ``pytest`` checks it against its contract.
        checks: attributes of the class of these checks, such as ``{"period": 8}``.
        more: further fields of the kind's description, such as ``phase`` of a pass.

    Raises:
        ConfigError: the kind is missing, or something else than a class or a function is decorated. What is wrong with
            the description is told when the file is loaded.
    """

    if callable(kind):
        raise ConfigError('write the kind: @component("router")')

    def register(made: T) -> T:
        if not hasattr(made, "__name__"):
            raise ConfigError("@component is put before a class or a function")
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", made.__name__).lower()
        first_line = (made.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        if first_line[1:2].islower():  # no abbreviation, as in "GELU with three matrices"
            first_line = first_line[0].lower() + first_line[1:]
        about = {"kind": kind, "name": name or words, "summary": summary or first_line, **more}
        made.__forge_component__ = about, example or {}, checks or {}  # type: ignore[attr-defined]  # read by registered()
        return made

    return register


def registered(module: ModuleType) -> Iterator[tuple[Any, ...]]:
    """The decorated factories of a module, each with three mappings: description, example and checks."""
    for made in vars(module).values():
        about = vars(made).get("__forge_component__") if hasattr(made, "__dict__") else None
        if about is not None and made.__module__ == module.__name__:
            yield made, *about


def trust(text: str) -> None:
    """Let this process run a text, and the processes that it starts."""
    known = [one for one in os.environ.get(TRUST_VARIABLE, "").split(",") if one]
    os.environ[TRUST_VARIABLE] = ",".join(dict.fromkeys([*known, _digest(text)]))


def with_files(catalog: Catalog, files: Mapping[str, str]) -> Catalog:
    """The catalog of what is installed, with the components of files.

    Args:
        files: texts by the names of files.

    Raises:
        ConfigError: one is not trusted, fails, or registers nothing or something wrong; the sentence names the file.
    """
    return Catalog([*catalog.plugins, *(_plugin(name, files[name], catalog.kinds) for name in sorted(files))])


def _plugin(name: str, text: str, kinds: Mapping[str, Kind]) -> Plugin:
    if not {"all", _digest(text)} & {*os.environ.get(TRUST_VARIABLE, "").split(",")}:
        raise ConfigError(
            f"{name} is code of {len(text.splitlines())} lines that came with this job, and is not run unasked. Read "
            "it, then add --trust-files to the command"
        )
    module = _module(name, text)
    components = [_component(name, module, made, about, kinds) for made, about, *_ in registered(module)]
    names = [(one.kind, one.name) for one in components]
    if not components:
        raise ConfigError(f"{name} registers nothing: put @component(kind) before a class or a function")
    for kind, twice in names:
        if names.count((kind, twice)) > 1:
            raise ConfigError(f"{name} registers the {kind_words(kind)} '{twice}' {names.count((kind, twice))} times")
    return Plugin(
        distribution=PROVIDER + name,
        version=_digest(text)[:12],
        import_seconds=module.__dict__["__forge_seconds__"],
        heavy=module.__dict__["__forge_heavy__"],
        components=tuple((one.kind, one) for one in components),
    )


def _module(name: str, text: str) -> ModuleType:
    """The module of a text, run once a process; its name says which text it is."""
    path = f"forge_file_{re.sub(r'[^0-9a-zA-Z_]', '_', name.removesuffix('.py'))}_{_digest(text)[:12]}"
    if path in sys.modules:
        return sys.modules[path]
    loader = _TextLoader(path, name, text)
    module = sys.modules[path] = module_from_spec(spec_from_loader(path, loader))  # type: ignore[arg-type]  # it has one
    before, start = {*HEAVY_MODULES} & sys.modules.keys(), time.perf_counter()
    try:
        with output_of(PROVIDER + name):
            loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path]
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{name}, line {error.lineno}: {error.msg}") from error
        if not isinstance(error, (Exception, SystemExit)):
            raise
        from traceback import extract_tb

        line = next((one.lineno for one in reversed(extract_tb(error.__traceback__)) if one.filename == name), None)
        alone = ". A plugin file imports installed packages, and no file beside it" * isinstance(error, ImportError)
        words = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}{alone}"
        raise ConfigError(f"{name}, line {line}: {words}") from error
    heavy = tuple(sorted({*HEAVY_MODULES} & sys.modules.keys() - before))
    vars(module).update(__forge_seconds__=time.perf_counter() - start, __forge_heavy__=heavy)
    return module


class _TextLoader(SourceFileLoader):
    """Runs a text; tracebacks and torch.compile find its lines. The class that ``importlib.abc`` has for it takes 14 ms
    of each command to import."""

    def __init__(self, module: str, name: str, text: str) -> None:
        super().__init__(module, name)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self._text


def _component(file: str, module: ModuleType, made: Any, about: dict[str, Any], kinds: Mapping[str, Kind]) -> Component:
    kind = about["kind"]
    if kind not in kinds:
        hint = did_you_mean(kind, kinds) or f" Kinds: {', '.join(kinds)}."
        raise ConfigError(f"{file}: @component({kind!r}) names no kind.{hint}")
    try:
        return kinds[kind].descriptor(**about, factory=f"{module.__name__}:{made.__name__}")
    except (TypeError, ValueError) as error:
        words = error if about["summary"] else "it needs a docstring, whose first line is the summary, or summary=…"
        raise ConfigError(f"{file}: @component({kind!r}) of {made.__name__}: {words}") from error


def _digest(text: str) -> str:
    import hashlib  # OpenSSL takes 4 ms to load, and few jobs have files

    return hashlib.sha256(text.encode()).hexdigest()
