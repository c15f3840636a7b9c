"""Import paths ``"package.module:Name"`` become objects, and a failure says whose bug it is."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError, PluginError, did_you_mean
from forge_core.registry.plugin_output import output_of

if TYPE_CHECKING:
    from pathlib import Path

HEAVY_MODULES = ("jax", "numpy", "tensorflow", "torch", "transformers")
"""Libraries whose import takes long enough to be felt, so that a plugin module may not import them."""


def load_reference(reference: str, *, what: str, owner: str) -> Any:
    """The object that an import path names.

    Args:
        reference: ``"package.module:Name"``.
        what: what the object is, for the message: ``"the config class of router 'topk'"``.
        owner: the distribution that gave the path.

    Raises:
        PluginError: it cannot be imported. Errors that are already sentences for the user pass through.
    """
    module, _, name = reference.partition(":")
    try:
        with output_of(owner):
            return getattr(import_module(module), name)
    except ForgeError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{owner}: cannot import {what} '{reference}' ({type(error).__name__}: {error}). This is a bug in {owner}."
        ) from error


def why_undefined(reference: str) -> str:
    """Why an import path names nothing, by the module's source alone: importing it may take seconds. Nothing where that
    cannot be known so.

    Args:
        reference: as for ``load_reference``.
    """
    path, _, name = reference.partition(":")
    if hasattr(sys.modules.get(path), name):
        return ""
    source = source_of(path)
    if isinstance(source, str):
        return source
    if source is None or source.suffix != ".py" or not source.is_file():
        return ""
    text = source.read_text(encoding="utf-8", errors="replace")
    if re.search(rf"^(?:async def|def|class)\s+{name}\b|^{name}\s*[:=]|^\s*from .* import \*", text, re.MULTILINE):
        return ""
    from symtable import symtable  # rarely needed: most factories are a class or a function

    try:
        symbols = symtable(text, source.name, "exec").get_symbols()
    except SyntaxError as error:
        return f"{source.name}, line {error.lineno}: {error.msg}."
    names = [one.get_name() for one in symbols if one.is_assigned() or one.is_imported()]
    if name in names or "__getattr__" in names:
        return ""
    return f"there is no {name} in {path}.{did_you_mean(name, names)}"


def source_of(path: str) -> Path | str | None:
    """The file of a module, found without importing its package; or a sentence, or nothing if it cannot be told."""
    from importlib.util import find_spec
    from pathlib import Path

    package, *inner = path.split(".")
    if package in sys.builtin_module_names:
        return None
    spec = find_spec(package)
    if spec is None:
        return f"there is no package '{package}'."
    if not inner:
        return Path(spec.origin) if spec.origin else None
    folders = [Path(folder, *inner[:-1]) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        for candidate in (folder / f"{inner[-1]}.py", folder / inner[-1] / "__init__.py"):
            if candidate.is_file():
                return candidate
        if any(folder.glob(f"{inner[-1]}.*")):  # compiled
            return None
    known = [file.stem for folder in folders for file in folder.glob("*.py")]
    if not known:  # not in a folder: in a zip file, or made by a loader of its own
        return None
    return f"there is no module '{path}'.{did_you_mean(inner[-1], known)}"
