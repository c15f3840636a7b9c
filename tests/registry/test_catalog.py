"""Names resolve to one component, or to a sentence that says what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import forge_core
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog, Plugin
from forge_core.registry.component import Command, Component
from forge_core.registry.discovery import discover

PUBLISHED = tomllib.loads(
    (Path(forge_core.__file__).parent / "registry/known_plugins.toml").read_text(encoding="utf-8")
)


def component(name: str, **more) -> Component:
    return Component(name=name, summary=f"what {name} does", factory="a.b:c", config="a.b:D", **more)


def plugin(distribution: str, *components: tuple[str, Component], **more) -> Plugin:
    return Plugin(distribution=distribution, version="1.0", components=components, **more)


def message(catalog: Catalog, kind: str, name: str) -> str:
    with pytest.raises(ConfigError) as raised:
        catalog.lookup(kind, name)
    return str(raised.value)


ACME = plugin(
    "acme",
    ("optimizer", component("lion", aliases=["evolved_sign"])),
    ("optimizer", component("adan", deprecated="use 'lion'; it goes in 2.0")),
    ("router", component("topk")),
)


@pytest.mark.parametrize("name", ["lion", "evolved_sign", "acme:lion", "ACME:evolved_sign"])
def test_a_component_is_found_by_name_alias_and_qualified_name(name):
    found = Catalog([ACME]).lookup("optimizer", name)

    assert found.qualified_name == "acme:lion"
    assert found.plugin is ACME


def test_the_catalog_is_sorted_whatever_order_plugins_are_found_in():
    other = plugin("beta", ("router", component("alpha")))

    for order in ([ACME, other], [other, ACME]):
        found = [one.qualified_name for one in Catalog(order).components("router")]
        assert found == ["beta:alpha", "acme:topk"]


def test_a_deprecation_is_there_for_the_caller_to_print():
    catalog = Catalog([ACME])

    assert catalog.lookup("optimizer", "lion").deprecation == ""
    expected = "'adan' of acme 1.0 is deprecated: use 'lion'; it goes in 2.0"
    assert catalog.lookup("optimizer", "adan").deprecation == expected


def test_an_unknown_name_gets_the_nearest_the_available_ones_and_what_did_not_load():
    unwell = plugin("forge-broken", status="broken", reason="ModuleNotFoundError: No module named 'x'")
    off = plugin("forge-off", status="disabled", reason="it was switched off")

    assert message(Catalog([ACME, unwell, off]), "optimizer", "lionn") == (
        "no installed plugin provides an optimizer named 'lionn'. Did you mean 'lion'? Available: adan, lion.\n"
        "note: forge-broken 1.0 did not load (ModuleNotFoundError: No module named 'x'); see 'forge plugins'\n"
        "note: forge-off 1.0 was not imported (it was switched off)"
    )


def test_a_name_of_another_kind_is_recognised():
    assert message(Catalog([ACME]), "router", "lion") == (
        "'lion' names an optimizer; this key needs a router. Available: topk."
    )


def test_a_name_that_two_plugins_provide_needs_a_line_to_paste():
    catalog = Catalog([ACME, plugin("beta", ("router", component("topk")))])

    assert message(catalog, "router", "topk") == (
        "router 'topk' is provided by 2 plugins. Say which one:\n"
        '    name = "acme:topk"    # what topk does\n'
        '    name = "beta:topk"    # what topk does'
    )
    assert catalog.lookup("router", "beta:topk").plugin.distribution == "beta"
    assert [str(conflict) for conflict in catalog.conflicts()] == [
        "router 'topk' is provided by acme and beta; write name = \"acme:topk\" to choose"
    ]


def test_an_alias_that_is_another_plugins_name_is_a_conflict_too():
    catalog = Catalog([ACME, plugin("beta", ("optimizer", component("own", aliases=["lion"])))])

    assert 'name = "beta:own"' in message(catalog, "optimizer", "lion")
    assert catalog.lookup("optimizer", "own").qualified_name == "beta:own"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("acm:lion", "no plugin named 'acm' is installed, which should provide optimizer 'lion'. Did you mean 'acme'?"),
        ("acme:lio", "acme 1.0 provides no optimizer named 'lio'. Did you mean 'lion'? It provides: adan, lion."),
        ("sick:lion", "optimizer 'lion' was asked of sick 1.0, which did not load: ValueError"),
        (
            "forge-plugins-optim:adamw",
            "optimizer 'adamw' is in forge-plugins-optim, which is not installed: pip install forge-plugins-optim",
        ),
    ],
)
def test_a_qualified_name_that_leads_nowhere_is_explained(name, expected):
    catalog = Catalog([ACME, plugin("sick", status="broken", reason="ValueError")])

    assert message(catalog, "optimizer", name) == expected


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ([], "is in forge-plugins-moe, which is not installed: pip install forge-plugins-moe"),
        (
            [plugin("forge-plugins-moe", status="disabled", reason="it was switched off")],
            "is in forge-plugins-moe, which was not imported (it was switched off)",
        ),
        (
            [plugin("forge-plugins-moe", status="broken", reason="OSError")],
            "is in forge-plugins-moe, which did not load (OSError)",
        ),
        (
            [plugin("forge-plugins-moe")],
            "is in a later forge-plugins-moe than the installed 1.0: pip install --upgrade forge-plugins-moe",
        ),
    ],
)
def test_a_published_component_that_is_not_there_says_how_to_get_it(installed, expected):
    assert f"router 'sigmoid_topk' {expected}" in message(Catalog(installed), "router", "sigmoid_topk")


def test_a_misspelt_published_name_is_recognised():
    assert message(Catalog([]), "router", "sigmod_topk") == (
        "no installed plugin provides a router named 'sigmod_topk'. Did you mean 'sigmoid_topk'? It is in "
        "forge-plugins-moe, which is not installed: pip install forge-plugins-moe. None is installed. "
        "Published ones come with: pip install forge-plugins-moe."
    )


def test_an_unknown_kind_is_explained():
    assert message(Catalog([]), "ruoter", "x").startswith(
        "no installed plugin adds the kind 'ruoter'. Did you mean 'router'? Known kinds: callback, checkpoint_mirror, "
        "cluster_environment, data_source,"
    )


def test_a_missing_optional_module_is_named_before_anything_is_built():
    needy = plugin("acme", ("router", component("sparse", modules=["json", "megablocks.ops"])))

    assert message(Catalog([needy]), "router", "sparse") == (
        "router 'sparse' of acme 1.0 needs 'megablocks.ops', which cannot be imported; install what provides it"
    )
    assert Catalog([needy]).find("router", "sparse").component.name == "sparse"


def test_a_missing_module_that_an_extra_of_the_components_name_brings_says_so():
    needy = plugin("forge-plugins-parallel", ("parallel_pass", component("fp8", modules=["megablocks.ops"])))

    assert message(Catalog([needy]), "parallel_pass", "fp8").endswith(
        "which cannot be imported; pip install 'forge-plugins-parallel[fp8]'"
    )


def test_a_command_of_two_plugins_is_an_error_on_use():
    command = Command(name="extract", summary="s", run="a.b:c")
    catalog = Catalog([plugin("acme", commands=(command,)), plugin("beta", commands=(command,))])

    assert "extract" not in catalog.commands
    with pytest.raises(ConfigError, match="forge --disable-plugin beta extract"):
        catalog.command("extract")
    assert [conflict.kind for conflict in catalog.conflicts()] == ["command"]


def test_the_list_of_published_packages_is_sorted():
    for table in (*PUBLISHED.values(), *PUBLISHED["components"].values()):
        assert list(table) == sorted(table)
    for kinds in PUBLISHED["components"].values():
        for names in kinds.values():
            assert names == sorted(set(names))


def test_published_passes_that_serve_something_are_published_components():
    for served_by in PUBLISHED["serves"].values():
        distribution, name = served_by.split(":")
        assert name in PUBLISHED["components"][distribution]["parallel_pass"]


@pytest.mark.parametrize("distribution", PUBLISHED["components"])
def test_what_our_installed_packages_provide_is_published(distribution):
    provided = {
        *((kind, one.name) for found in discover().plugins if found.distribution == distribution
          for kind, one in found.components),
        *(("command", one.name) for found in discover().plugins if found.distribution == distribution
          for one in found.commands),
    }  # fmt: skip

    published = {(kind, name) for kind, names in PUBLISHED["components"][distribution].items() for name in names}
    assert provided == published, "an upgrade would be promised that does not exist"
