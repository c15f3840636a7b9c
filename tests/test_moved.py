"""Modules that had another name are found for a while, or say where they are."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import pytest

import forge_core
from forge_core.cli import main

MOVED = tomllib.loads((Path(forge_core.__file__).parent / "moved.toml").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch):
    """An import of an earlier test is forgotten."""
    for name in MOVED["aliases"]:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("old", MOVED["aliases"])
def test_an_alias_is_the_module_itself_and_warns_where_it_is_imported(old):
    new = MOVED["aliases"][old]

    with pytest.warns(DeprecationWarning, match=rf"^{old} is {new} now") as said:
        found = importlib.import_module(old)

    assert found is importlib.import_module(new)
    assert len(said) == 1
    assert found.__name__ == new


def test_a_warning_names_the_line_of_the_import(tmp_path, monkeypatch):
    (tmp_path / "old_plugin.py").write_text("\nfrom forge_core.accumulation import accumulate\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.warns(DeprecationWarning, match="forge_core.ops.accumulate now") as said:
        importlib.import_module("old_plugin")

    assert (Path(said[0].filename).name, said[0].lineno) == ("old_plugin.py", 2)


@pytest.mark.parametrize("old", MOVED["gone"])
def test_an_import_of_another_module_says_the_new_name(old):
    with pytest.raises(ModuleNotFoundError, match=rf"^{old} is {MOVED['gone'][old]} now"):
        importlib.import_module(old)


@pytest.mark.parametrize("new", sorted({*MOVED["aliases"].values(), *MOVED["gone"].values()}))
def test_what_is_named_is_there(new):
    assert importlib.util.find_spec(new) is not None


def test_a_module_that_never_was_is_missed_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'forge_core.nothing'$"):
        importlib.import_module("forge_core.nothing")


def test_a_plugin_that_needs_one_that_has_gone_is_listed_with_the_new_name(make_distribution, capsys):
    make_distribution("acme-old", files={"acme_old/plugin.py": "from forge_core.engine.peers import Peers\n"})

    main(["plugins", "--json"])

    (plugin,) = [one for one in json.loads(capsys.readouterr().out)["plugins"] if one["distribution"] == "acme-old"]
    assert plugin["status"] == "broken"
    assert "forge_core.engine.peers is forge_plugins_monitor.peers.peer_monitor now" in plugin["reason"]
