"""Builds the components that a job chooses: where names have become import paths, and import paths become objects."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs

from forge_core.config.converter import config_class, structure
from forge_core.config.problems import ConfigProblems, InvalidError
from forge_core.config.unstructure import plain
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import PluginError, noting
from forge_core.registry.catalog import Catalog
from forge_core.registry.component import Slot, kind_words
from forge_core.registry.imports import load_reference
from forge_core.registry.plugin_output import output_of

__all__ = ["ComponentBuilder", "config_class", "load_reference", "output_of"]


class ComponentBuilder:
    """The ``Builder`` of the contract, over what is installed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __call__(self, use: ComponentRef, /, **given: Any) -> Any:
        what = f"the factory of {kind_words(use.kind)} '{use.name}'"
        factory = load_reference(use.factory, what=what, owner=use.provider)
        positional = [use.config] if use.takes is None else []
        given = self._wanted(use, factory, {"build": self, **given})
        self._refuse_signature(use, factory, positional, given)
        with noting(f"raised by the factory of {self.words_for(use)}"), output_of(use.provider):
            built = factory(*positional, **given)
        self._refuse_result(use, built)
        if use.kind == "data_source" and not hasattr(built, "fingerprint"):
            built.fingerprint = fingerprint_of(use.config, given)
        return built

    def _wanted(self, use: ComponentRef, factory: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        """The keywords that a factory takes, among what it is given and, if its parameters are its keys, these."""
        if use.takes is not None:
            keys = {field.name: getattr(use.config, field.name) for field in attrs.fields(type(use.config))}
            return {key: one for key, one in {**given, **keys}.items() if not use.takes.isdisjoint((key, "**"))}
        left_out = [name for name in ("build", *self._catalog.kinds[use.kind].optional) if not takes(factory, name)]
        return {name: one for name, one in given.items() if name not in left_out}

    def _refuse_signature(
        self, use: ComponentRef, factory: Callable[..., Any], positional: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        try:
            inspect.signature(factory).bind(*positional, **given)
        except ValueError:  # as below
            return
        except TypeError as error:
            words = f"{'a config and ' if positional else ''}{', '.join(given) or 'nothing else'}"
            raise PluginError(
                f"{self.words_for(use)}: its factory '{use.factory}' cannot be called with {words}: {error}. This is a "
                f"bug in {use.provider}."
            ) from error

    def _refuse_result(self, use: ComponentRef, built: object) -> None:
        kind = self._catalog.kinds[use.kind]
        expected: type = object
        wanted = f"what {kind.contract.partition(':')[0]} describes"
        if kind.returns:
            expected = load_reference(kind.returns, what=f"the class of {kind.name}", owner="forge-core")
            wanted = f"a {kind.returns.replace(':', '.')}"
        if built is None or not isinstance(built, expected):
            found = "None" if built is None else f"a {type(built).__qualname__}"
            raise PluginError(
                f"{self.words_for(use)}: its factory '{use.factory}' returned {found}, and must return {wanted}. "
                f"This is a bug in {use.provider}."
            )

    def description_of(self, use: ComponentRef) -> Any:
        """The ``Component`` that its plugin registers, of the kind's own class."""
        return self._catalog.lookup(use.kind, use.qualified_name).component

    def words_for(self, use: ComponentRef) -> str:
        """Same as ``Catalog.words_for``."""
        return self._catalog.words_for(use)

    def resolve(self, kind: str, table: str | Mapping[str, Any]) -> ComponentRef:
        try:
            # For mypy an Annotated is not a type; the converter knows what to do with it.
            return structure(table, Annotated[ComponentRef, Slot(kind)], self._catalog)  # type: ignore[arg-type]
        except InvalidError as error:
            raise ConfigProblems([problem.under(kind) for problem in error.problems], f"this {kind}") from error


def fingerprint_of(config: Any, given: Mapping[str, Any]) -> str:
    """The fingerprint of a data source that has none: of its keys, of the files that they name, and of ``seq_len``."""
    import hashlib  # OpenSSL takes 4 ms to load; ``forge validate`` needs none of it

    digest = hashlib.sha256(json.dumps([plain(config), given.get("seq_len")], sort_keys=True).encode())
    for field in attrs.fields(type(config)):
        path = getattr(config, field.name)
        files = sorted(path.expanduser().rglob("*")) if isinstance(path, Path) and path.is_dir() else [path]
        for file in (one for one in files if isinstance(one, Path) and one.expanduser().is_file()):
            digest.update(f"{file} {file.expanduser().stat().st_size}".encode())
    return digest.hexdigest()


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether it has a parameter of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some callables written in C do not say
        return False
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
