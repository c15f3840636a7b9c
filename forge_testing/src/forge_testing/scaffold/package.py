"""Write an installable plugin package around one component of a given kind."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from string import Template

from forge_core import __version__
from forge_core.errors import ConfigError, did_you_mean
from forge_core.registry.hookspecs import CORE_KINDS

WITHOUT_PACKAGE = ("checkpoint_mirror", "observer", "phase_plan", "supervisor", "warm_start", "weight_source")
"""Kinds for which no package is written: their page among the hooks has a whole one."""
HOOKS = {
    **{kind.name: kind.hook for kind in CORE_KINDS if kind.name not in WITHOUT_PACKAGE},
    "command": "forge_commands",
    "check": "forge_checks",
}
"""The hook of each kind that a package can be written for."""


def write_package(kind: str, name: str, parent: Path) -> Path:
    """Write the package ``name`` into a new folder of that name.

    Args:
        kind: one of ``HOOKS``.
        name: lower-case words joined by ``-`` or ``_``; dashes make the distribution's name, underscores the package's
            and the component's.
        parent: where the folder is made; it exists.

    Returns:
        The new folder.

    Raises:
        ConfigError: unknown kind, a name that cannot be a package, or the folder exists already. Nothing is written.
    """
    if kind not in HOOKS:
        raise ConfigError(
            f"no package can be written for the kind '{kind}'.{did_you_mean(kind, HOOKS)} Kinds: {', '.join(HOOKS)}"
        )
    check_name(name, kind)
    target = new_folder(name, parent)
    write_files(target, package_files(kind, name))
    return target


def new_folder(name: str, parent: Path) -> Path:
    """The folder of a package that will be written.

    Raises:
        ConfigError: ``parent`` is no directory, or the folder exists already.
    """
    if not parent.is_dir():
        raise ConfigError(f"{parent} is not a directory; make it first, or leave out --dir")
    target = parent / name.replace("_", "-")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; choose another name, or remove it first")
    return target


def write_files(target: Path, files: Mapping[str, str]) -> None:
    """Write texts by their paths within ``target``, a new folder: all of them or none.

    Raises:
        ConfigError: they cannot be written.
    """
    try:
        for path, text in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def write_new(target: Path, text: str) -> None:
    """Write a file that is not there yet, whole or not at all.

    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{target} exists already; choose another name, or remove it first") from None
    except OSError as error:
        with suppress(OSError):  # it may not be there, as where its name is too long
            target.unlink()
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def write_config(name: str, parent: Path) -> Path:
    """Write a configuration to start from, ``NAME.toml``.

    Raises:
        ConfigError: ``parent`` is no directory, or the file exists already. Nothing is written.
    """
    if not parent.is_dir():
        raise ConfigError(f"{parent} is not a directory; make it first, or leave out --dir")
    target = parent / f"{name.removesuffix('.toml')}.toml"
    write_new(target, Path(__file__).with_name("config.txt").read_text(encoding="utf-8"))
    return target


def package_files(kind: str, name: str) -> dict[str, str]:
    """The files of the package by path. ``kind`` and ``name`` as for ``write_package``."""
    header, own = sections(kind)
    values = {"api": "1.3", **names_of(kind, name), **header}
    values = {key: Template(value).substitute(values) for key, value in values.items()}
    values |= {part: text.strip() + "\n" for part, text in sections("example")[1].items()}
    values["usage"] = Template(own.pop("usage")).substitute(values).strip()
    if "example.toml" in own:
        values["usage"] += "\n\n`forge run example.toml` trains a tiny model with it."
    own.pop("file", None)
    return filled({**sections("package")[1], **own}, values)


def filled(files: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Templates of files by templates of paths, with their values."""
    return {
        Template(path).substitute(values): Template(text).substitute(values).strip("\n") + "\n" * bool(text)
        for path, text in files.items()
    }


def check_name(name: str, kind: str = "") -> None:
    """
    Args:
        kind: of the template in which a class of this name is written.

    Raises:
        ConfigError: it cannot be the name of a package, or of the class.
    """
    package = name.replace("-", "_")
    if len(name) > _LONGEST:
        raise ConfigError(f"'{name[:8]}…' cannot be the name: it has {len(name)} characters, of at most {_LONGEST}")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(f"'{name}' cannot be the name: write lower-case words joined by '-', such as noisy-gate")
    for one in (package, _class_name(package)):
        if one in sys.stdlib_module_names or keyword.iskeyword(one):
            raise ConfigError(f"'{name}' cannot be the name: Python has '{one}' itself; add a word, such as my-{name}")
    if find_spec(package) is not None:
        raise ConfigError(f"'{name}' cannot be the name: a package '{package}' is installed already; choose another")
    text = Path(__file__).with_name(f"{kind}.txt").read_text(encoding="utf-8") if kind else ""
    taken = re.findall(r"\w+", " ".join(re.findall("^(?:from|import|class) .*", text, re.MULTILINE)))
    for one in (_class_name(package), f"{_class_name(package)}Config"):
        if one in taken:
            raise ConfigError(f"'{name}' cannot be the name: its code uses another {one}; add a word, as in my-{name}")


_LONGEST = 64
"""Characters of a name: its folder's and files' have some more."""


def _class_name(package: str) -> str:
    return "".join(word.capitalize() for word in package.split("_"))


def names_of(kind: str, name: str) -> dict[str, str]:
    """What templates call a component of this kind, its class, module, package and distribution."""
    underscored = name.replace("-", "_")
    major, minor = (int(part) for part in __version__.split(".")[:2])
    bound = f"0.{minor + 1}" if major == 0 else f"{major + 1}"  # before 1.0, a minor version may break
    return {
        "kind": kind,
        "kind_words": kind.replace("_", " "),
        "hook": HOOKS[kind],
        "module": kind,
        "name": underscored,
        "package": underscored,
        "distribution": name.replace("_", "-"),
        "class_name": _class_name(underscored),
        "core_version": f"{major}.{minor}",
        "core_bound": bound,
        "dependencies": f'"forge-core>={major}.{minor},<{bound}"',
    }


def sections(template: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the header of a template (lines ``key: value``) and its files by path."""
    text = Path(__file__).with_name(f"{template}.txt").read_text(encoding="utf-8")
    head, *parts = re.split(r"^=== (.+)\n", text, flags=re.MULTILINE)
    header = dict(line.split(": ", 1) for line in head.splitlines())
    return header, dict(zip(parts[::2], parts[1::2], strict=True))
