"""Modules that had another name: ``moved.toml`` says which, and where they are now.

The finder stands behind all others and reads that file when an import fails, so an import that succeeds costs nothing.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# Nothing else: these are loaded before `__main__` has taken the working folder off the path.


class MovedModules:
    """Finds modules by their old names."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Same as ``importlib.abc.MetaPathFinder``."""
        if not fullname.startswith("forge_core."):
            return None
        aliases, gone = _table()["aliases"], _table()["gone"]
        if fullname in gone:
            raise ModuleNotFoundError(f"{fullname} is {gone[fullname]} now, which is not public", name=fullname)
        is_folder = any(name.rpartition(".")[0] == fullname for name in (*aliases, *gone))
        if not is_folder and fullname not in aliases:
            return None
        return ModuleSpec(fullname, self, is_package=is_folder)  # type: ignore[arg-type]  # it has a loader's methods

    def create_module(self, spec: ModuleSpec) -> None:
        """Same as ``importlib.abc.Loader``: an ordinary module, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Same as ``importlib.abc.Loader``."""
        import warnings
        from importlib import import_module

        name, new = module.__name__, _table()["aliases"].get(module.__name__)
        if new is not None:
            # stacklevel 2 is the import statement: Python leaves its own import machinery out
            warnings.warn(f"{name} is {new} now; its old name goes with version 0.2", DeprecationWarning, stacklevel=2)
            sys.modules[name] = import_module(new)


def find_moved_modules() -> None:
    """From here on, in this process."""
    sys.meta_path.append(MovedModules())


def _table() -> dict[str, dict[str, str]]:
    import tomllib
    from pathlib import Path

    return tomllib.loads(Path(__file__).with_name("moved.toml").read_text(encoding="utf-8"))
