"""``forge docs``: the documentation in the terminal."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.commands.table import aligned
from forge_core.contracts.command import Invocation
from forge_core.errors import ConfigError, nearest_hint
from forge_core.registry.catalog import Catalog
from forge_plugins_monitor.pages.library import SOURCES, Page, elsewhere, pages, sections
from forge_plugins_monitor.pages.terminal import markdown, see_also


@attrs.frozen(kw_only=True)
class ListedPage:
    """A page of the documentation."""

    name: str
    title: str


@attrs.frozen(kw_only=True)
class ToldPage:
    """A page of the documentation, or a section of one."""

    name: str
    title: str
    text: str
    """Markdown."""
    see_also: Sequence[str]
    """Names of other pages."""


@click.command()
@click.argument("name", required=False)
@click.option("--browser", is_flag=True, help="Open it in a browser, where the HTML was built (make docs).")
@json_option(ToldPage | list[ListedPage])
@click.pass_obj
def docs(obj: Invocation, name: str | None, browser: bool, as_json: bool) -> None:
    """Show the page NAME of the documentation, without a network; or, without NAME, list the pages.

    NAME is a page (running), a hook (forge_routers), a kind of component (router), or a section of any page
    (exit-codes). In a pipe it is Markdown.

    Exit codes: 0 shown, 2 there is no such page.
    """
    known = pages()
    if name is None and browser:
        _open("index.html")
    elif name is None:
        if as_json:
            print_json([ListedPage(name=page.name, title=page.title) for page in known.values()])
        else:
            click.echo(_table(known, obj.catalog()))
    else:
        page = _find(name, known, obj.catalog())
        if browser:
            _open(page.name.replace(page.file.stem, str(page.file.with_suffix(".html")), 1))
        elif as_json:
            others = see_also(page, known)
            print_json(ToldPage(name=page.name, title=page.title, text=markdown(page), see_also=others))
        else:
            _show(page, see_also(page, known))


def _find(name: str, known: Mapping[str, Page], catalog: Catalog) -> Page:
    """Raises:
    ConfigError: there is none of that name.
    """
    wanted = name.strip().removesuffix(".md").rpartition("/")[2]
    kind = catalog.kinds.get(wanted.replace("-", "_"))
    page = known.get(wanted) or (known.get(kind.hook) if kind else None)
    if page is not None:
        return page
    on_page, _, anchor = wanted.rpartition("#")
    anchor = anchor.lower().replace(" ", "-")
    for one in [known[on_page]] if on_page in known else known.values():
        if anchor in (found := sections(one)):
            return found[anchor]
    names = (on_page or wanted, kind.hook if kind else "")
    wanted_file = next((file for file in elsewhere() if Path(file).stem in names), None)
    if wanted_file is not None:
        raise ConfigError(
            f"the page '{name}' is not in the wheels, but on the site, and in a checkout: docs/{wanted_file}"
        )
    if kind is not None:
        raise ConfigError(f"the kind '{kind.name}' has no page; its contract is {kind.contract}")
    raise ConfigError(f"there is no page '{name}'{_instead(wanted, [*known, *catalog.kinds], catalog)}")


def _instead(wanted: str, names: list[str], catalog: Catalog) -> str:
    for kind in catalog.kinds:
        if catalog.providers(kind, wanted):
            return f"; it names a component: forge plugins show {kind} {wanted}"
    return nearest_hint(wanted, names) or "; forge docs lists them"


def _table(known: Mapping[str, Page], catalog: Catalog) -> str:
    kinds = {kind.hook: kind.name for kind in catalog.kinds.values()}
    rows = [(page.name, kinds.get(page.name, ""), page.title) for page in known.values()]
    return "\n".join(aligned([("NAME", "OR", "TITLE"), *rows]))


def _show(page: Page, others: Sequence[str]) -> None:
    text = markdown(page)
    if others:
        text += f"\nSee also: {', '.join(f'`forge docs {one}`' for one in others)}\n"
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def _open(page: str) -> None:
    built = SOURCES / "_build" / "html"
    file, hash_mark, anchor = page.partition("#")
    if not (built / file).is_file():
        raise ConfigError(f"--browser: no HTML was built in {built}; make docs in a checkout does so")
    click.echo(f"opening {built / page}")
    webbrowser.open((built / file).as_uri() + hash_mark + anchor)
