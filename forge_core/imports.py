"""Import paths ``"package.module:Name"`` become objects, and a failure says whose bug it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forge_core.errors import ForgeError, PluginError


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
        return getattr(import_module(module), name)
    except ForgeError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{owner}: cannot import {what} '{reference}' ({type(error).__name__}: {error}). This is a bug in {owner}."
        ) from error
