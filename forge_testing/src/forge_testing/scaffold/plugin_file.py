"""Write a plugin in a file, and the package around one that has become good."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

import attrs
import tomli_w

from forge_core.config.describe import literal
from forge_core.errors import ConfigError, did_you_mean, with_article
from forge_core.registry.component import Component, kind_words
from forge_core.registry.discovery import discover
from forge_core.registry.entry_points import canonical_distribution
from forge_core.registry.plugin_files import PROVIDER, with_files
from forge_testing.plugin_file import FileCase, cases_in
from forge_testing.scaffold.package import (
    HOOKS,
    check_name,
    filled,
    names_of,
    new_folder,
    sections,
    write_files,
    write_new,
)

_TABLES = {
    "callback": "[[callbacks]]",
    "data_source": "[data]",
    "evaluation": "[[evaluations]]\ninterval = 100",
    "feed_forward": "[model.feed_forward]",
    "router": "[model]\nnum_experts = 8\n\n[model.moe.router]",
    "tokenizer": "[data.tokenizer]",
    "tracker": "[[trackers]]",
}
"""The table of a configuration that chooses a component, where it is not called as the kind is."""


def kinds_with_file() -> list[str]:
    """The kinds of which a file to start from can be written."""
    return [kind for kind in HOOKS if "file" in sections(kind)[1]]


def write_file(kind: str, name: str, parent: Path) -> Path:
    """Write ``NAME.py``, a plugin in a file with one component, which passes the kit of its kind.

    Raises:
        ConfigError: there is none for this kind, the name is none of a module, or the file exists. Nothing is written.
    """
    kinds = kinds_with_file()
    if kind not in kinds:
        raise ConfigError(
            f"no plugin file can be written for the kind '{kind}'.{did_you_mean(kind, kinds)} Kinds: {', '.join(kinds)}"
        )
    check_name(name, kind)
    if not parent.is_dir():
        raise ConfigError(f"{parent} is not a directory; make it first, or leave out --dir")
    values = names_of(kind, name)
    target = parent / f"{values['name']}.py"
    write_new(target, Template(sections(kind)[1]["file"]).substitute(values).strip() + "\n")
    return target


def settings_for(case: FileCase) -> str:
    """The lines of a configuration that use a component of a file."""
    return f'[plugins]\nfiles = ["{case.file.name}"]\n\n{_table(case)}'


def write_package_from(file: Path, kind: str, name: str, parent: Path) -> Path:
    """Write the package NAME around the components of a plugin file.

    Raises:
        ConfigError: the file is no plugin file, has no component of ``kind`` or one of a package's kind, or there is
            something of the package's name already. Nothing is written.
    """
    check_name(name)
    target = new_folder(name, parent)
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"--from {file}: {'it must be a Python file' if file.exists() else 'there is no such file'}")
    cases = cases_in(file)
    (plugin,) = (one for one in with_files(discover(), cases[0].texts).plugins if one.distribution.startswith(PROVIDER))
    components = [component for _, component in plugin.components]
    for case in cases:
        if case.kind not in HOOKS:
            kind_of_it = with_article(kind_words(case.kind))
            raise ConfigError(f"--from {file}: '{case.name}' is {kind_of_it}, for which no package can be written")
    if kind not in {component.kind for component in components}:
        kinds = ", ".join(dict.fromkeys(kind_words(component.kind) for component in components))
        raise ConfigError(f"--from {file}: it registers no {kind_words(kind)}; it registers: {kinds}")
    names = names_of(kind, name)
    first = next(component for component in components if component.kind == kind)
    own = {"name": first.name, "summary": first.summary, "dependencies": names["dependencies"]}
    own["dependencies"] += "".join(f', "{one}"' for one in _further_requirements(cases[0].texts[file.name]))
    usage = "\n".join(f"```toml\n{_table(case)}```" for case in cases)
    usage += "\n\n`forge run example.toml` trains a tiny model with the first."
    values = {**names, **own, "usage": usage, "factory": "", "api": "1.3"}
    package, module = names["package"], names["module"]
    files = filled(sections("package")[1], values) | {
        f"src/{package}/plugin.py": _plugin_module(components, f"{package}.{module}"),
        f"src/{package}/{module}.py": _without_decorators(cases[0].texts[file.name]).replace(
            f"{PROVIDER}{file.name}:", f"{names['distribution']}:"
        ),
        f"tests/test_{module}.py": _tests(cases, names["distribution"]),
        "example.toml": _example(next(case for case in cases if case.kind == kind)),
    }
    write_files(target, files)
    return target


def _further_requirements(text: str) -> list[str]:
    """The distributions that a file imports from, beyond the core and what the core requires."""
    tree = ast.parse(text)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    providers, catalog = metadata.packages_distributions(), discover()
    found = {one for name in imported for one in providers.get(name.partition(".")[0], ())}
    found |= {plugin.distribution for name in imported if (plugin := catalog.owner_of(name))}  # editable ones, too
    core = {re.split(r"[^\w.-]", line)[0] for line in metadata.requires("forge-core") or ()}
    return sorted(set(map(canonical_distribution, found)) - set(map(canonical_distribution, core)) - {"forge-core"})


def _table(case: FileCase) -> str:
    keys = "".join(f"{key} = {literal(value)}\n" for key, value in case.config.items())
    if case.kind == "parallel_pass":
        return f"[parallel.passes.{case.name}]\n{keys}"
    return f'{_TABLES.get(case.kind, f"[{case.kind}]")}\nname = "{case.name}"\n{keys}'


def _example(case: FileCase) -> str:
    """A run of a tiny model with a component: its tables in place of others, or within them."""
    parts = sections("example")[1]
    job = tomllib.loads("".join(parts.values()))
    for section, table in tomllib.loads(_table(case)).items():
        whole = isinstance(table, list) or "name" in table
        job[section] = table if whole else {**job.get(section, {}), **table}
    if case.kind == "evaluation":  # of two files one is held out; __init__.py may be too short for a sample
        job["data"] |= {"pattern": "**/[!_]*.py", "validation": 0.5}
    about, _, _ = parts["run"].strip().partition("\n")
    return f"{about}\n{tomli_w.dumps(job)}"


def _plugin_module(components: list[Component], module: str) -> str:
    """The text of ``plugin.py``."""
    classes = ", ".join(sorted({type(component).__name__ for component in components}))
    lines = [
        '"""What this package registers. Every forge command imports this file: keep it free of torch."""\n',
        f"from forge_core.api import {classes}\n",
        'FORGE_API = "1.3"\n',
        "components = [",
    ]
    for component in components:
        name = component.factory.partition(":")[2]
        lines += [f"    {type(component).__name__}("]
        lines += [f"        {key}={_source(value)}," for key, value in _fields(component)]
        lines += [f'        factory="{module}:{name}",', "    ),"]
    return "\n".join([*lines, "]", ""])


def _fields(component: Component) -> Iterator[tuple[str, Any]]:
    """What a description says beyond its defaults, without the factory."""
    for key in ("kind", "name", "summary"):
        yield key, getattr(component, key)
    for field in attrs.fields(type(component)):
        value = getattr(component, field.name)
        if field.name not in ("kind", "name", "summary", "factory") and value != field.default:
            yield field.name, value


def _source(value: Any) -> str:
    """A value as Python source, with the quotes that formatters write."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value).replace("'", '"')


def _without_decorators(text: str) -> str:
    """A plugin file as a module of a package, whose ``plugin.py`` says what ``@component`` said."""
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    for node in tree.body:
        for decorator in getattr(node, "decorator_list", ()):
            if ast.unparse(decorator).startswith("component("):
                for number in range(decorator.lineno - 1, decorator.end_lineno):
                    lines[number] = ""
        if isinstance(node, ast.ImportFrom) and node.module == "forge_core.api":
            names = [one for one in node.names if one.name != "component"]
            kept = ast.unparse(ast.ImportFrom(node.module, names, 0)) + "\n" if names else ""
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
            lines[node.lineno - 1] = kept
    return "".join(lines)


def _tests(cases: list[FileCase], distribution: str) -> str:
    imports = sorted({f"from {case.kit.__module__} import {case.kit.__name__}" for case in cases})
    classes = []
    for case in cases:
        own: Mapping[str, Any] = {"component": f"{distribution}:{case.name}", "config": case.config, **case.checks}
        body = [f"    {key} = {_source(value)}" for key, value in own.items() if value != {}]
        classes.append("\n".join([f"class {case.title}({case.kit.__name__}):", *body]))
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(classes) + "\n"
