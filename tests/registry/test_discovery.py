"""Each plugin is loaded on its own: what is wrong with one is said of that one, and touches no other."""

from __future__ import annotations

import json
import re
import sys
from textwrap import indent

import pytest

from forge_core.cli import main
from forge_core.registry.catalog import Plugin
from forge_core.registry.discovery import discover

ROUTER = """
    from forge_core.api import Command, Component, Kind, hookimpl

    FORGE_API = "1.0"

    @hookimpl
    def forge_routers():
        yield Component(name="{name}", summary="s", factory="{package}.routers:make", config="{package}.config:C")
"""


def router_plugin(package: str, name: str = "topk", more: str = "") -> dict[str, str]:
    return {f"{package}/plugin.py": ROUTER.format(package=package, name=name) + more}


def find(distribution: str, **options) -> Plugin:
    return next(plugin for plugin in discover(**options).plugins if plugin.distribution == distribution)


def names(plugin: Plugin) -> list[str]:
    return [f"{kind}:{component.name}" for kind, component in plugin.components]


def broken(make_distribution, source: str) -> Plugin:
    """What becomes of a plugin with this source. Its neighbour must always be well."""
    make_distribution("acme-neighbour", files=router_plugin("acme_neighbour", "neighbour"))
    make_distribution("acme-broken", "0.1", {"acme_broken/plugin.py": source})
    assert names(find("acme-neighbour")) == ["router:neighbour"]
    plugin = find("acme-broken")
    assert plugin.components == plugin.commands == plugin.kinds == ()
    return plugin


def test_a_plugin_is_known_by_its_distribution_and_imports_no_component(make_distribution):
    make_distribution(
        "Acme.Routers",
        "2.0",
        router_plugin("acme_routers")
        | {
            "entry_points.txt": """
        # a comment
        [console_scripts]
        acme = acme_routers:main

        [forge.v1]
        whatever=acme_routers.plugin
    """.replace("        ", "")
        },
    )

    plugin = find("acme-routers")

    assert (plugin.status, plugin.version, plugin.reason) == ("ok", "2.0", "")
    assert names(plugin) == ["router:topk"]
    assert plugin.import_seconds > 0
    assert "acme_routers.plugin" in sys.modules
    assert "acme_routers.routers" not in sys.modules


def test_two_plugins_with_equal_entry_point_names_are_both_loaded(make_distribution):
    for name in ("alpha-moe", "beta-moe"):
        package = name.replace("-", "_")
        entry_point = {"entry_points.txt": f"[forge.v1]\nmoe = {package}.plugin\n"}
        make_distribution(name, files=router_plugin(package) | entry_point)

    assert find("alpha-moe").status == find("beta-moe").status == "ok"


def test_the_first_installation_on_the_path_counts(make_distribution):
    make_distribution("acme", "1.0", router_plugin("acme", "old"))
    make_distribution("acme", "2.0", router_plugin("acme", "new"))

    assert find("acme").version == "2.0"
    assert names(find("acme")) == ["router:new"]


def test_a_distribution_that_is_not_utf8_hides_no_other(make_distribution):
    make_distribution("acme-neighbour", files=router_plugin("acme_neighbour", "neighbour"))
    site = make_distribution("acme-old", files=router_plugin("acme_old", "old"))
    for file in ("METADATA", "entry_points.txt"):
        path = site / "acme_old-1.0.dist-info" / file
        path.write_bytes(path.read_bytes() + "# café\n".encode("latin-1"))

    assert names(find("acme-neighbour")) == ["router:neighbour"]
    assert names(find("acme-old")) == ["router:old"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import not_installed_lib", "ModuleNotFoundError: No module named 'not_installed_lib'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_plugin_that_raises_on_import_is_broken_and_its_traceback_is_kept(make_distribution, source, error):
    plugin = broken(make_distribution, source)

    assert (plugin.status, plugin.reason) == ("broken", error)
    assert source in plugin.traceback


UNREADABLE = """
    class Unreadable(Exception):
        def __str__(self):
            raise ValueError("no words")

        __repr__ = __str__

"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (UNREADABLE + "    raise Unreadable", "Unreadable: its message cannot be read"),
        (UNREADABLE + "    FORGE_API = Unreadable()", "ValueError: no words"),
    ],
)
def test_what_even_looking_at_a_plugin_raises_touches_no_other(make_distribution, source, reason):
    plugin = broken(make_distribution, source)

    assert (plugin.status, plugin.reason) == ("broken", reason)


def test_a_plugin_module_that_makes_its_names_on_demand_is_asked_for_its_own_alone(make_distribution):
    lazy = "\n    def __getattr__(name):\n        return {}[name]\n"
    make_distribution("acme-lazy", files=router_plugin("acme_lazy", more=lazy))

    assert names(find("acme-lazy")) == ["router:topk"]


LISTED = (
    'Component(kind="router", name="topk", summary="s", factory="acme_made.routers:make", config="acme_made.config:C")'
)


@pytest.mark.parametrize(
    "made",
    [
        "@property\ndef components(self): return LISTED",
        "__slots__ = ['components']\ndef __init__(self): self.components = LISTED",
        "def __dir__(self): return ['components']\ndef __getattr__(self, name): return {'components': LISTED}[name]",
    ],
    ids=["property", "slots", "on demand"],
)
def test_an_object_may_make_its_components_as_it_is_asked(make_distribution, made):
    imports = f"from forge_core.api import Component\nLISTED = [{LISTED}]\n"
    announced = "[forge.v1]\nacme-made = acme_made.plugin:made\n"
    source = f"{imports}class Made:\n{indent(made, '    ')}\nmade = Made()\n"
    make_distribution("acme-made", files={"acme_made/plugin.py": source, "entry_points.txt": announced})

    assert names(find("acme-made")) == ["router:topk"]


def test_components_that_raise_as_they_are_asked_for_break_their_plugin_alone(make_distribution):
    lazy = "def __dir__():\n    return ['components']\n\ndef __getattr__(name):\n    return {}[name]\n"

    assert broken(make_distribution, lazy).reason == "KeyError: 'components'"


HOOK = "from forge_core.api import Command, Component, Kind, PassComponent, hookimpl\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(
            "@hookimpl\ndef forge_router(): return []",
            "unknown hook 'forge_router'. Did you mean 'forge_routers'?",
            id="a misspelt hook",
        ),
        pytest.param(
            "@hookimpl\ndef forge_zebras(): return []",
            "unknown hook 'forge_zebras'. If another plugin adds it, mark it @hookimpl(optionalhook=True).",
            id="a hook of nobody's",
        ),
        pytest.param(
            "def forge_routers(): return []",
            "forge_routers is not marked with @hookimpl, and would never be called",
            id="an unmarked hook",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers(): pass",
            "forge_routers: it must yield descriptions or return a list of them, not None",
            id="a hook that returns nothing",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers():\n    while True:\n        yield 1",
            "forge_routers: it must yield descriptions of type Component, not an int",
            id="numbers without end",
        ),
        pytest.param(
            "@hookimpl\ndef forge_kinds():\n    yield Kind(name='a', hook='as', summary='s', contract='a.b:C')",
            "forge_kinds: ValueError: 'hook' must match regex 'forge_[a-z_]+' ('as' doesn't)",
            id="a kind whose hook has no prefix",
        ),
        pytest.param(
            "@hookimpl\ndef forge_kinds():\n    yield Kind(name='a', hook='forge_as', summary='s', contract='a.b:C', "
            "descriptor=int)",
            "forge_kinds: ValueError: descriptor must be Component, or a class that extends it, got <class 'int'>",
            id="a kind whose descriptions are none",
        ),
        pytest.param(
            "@hookimpl\ndef forge_kinds():\n    yield Kind(name='a', hook='forge_as', summary='s', contract='a.b:C', "
            "optional=(3,))",
            "forge_kinds: ValueError: optional must be lower-case words joined by '_' or '-', got 3",
            id="a kind whose keywords are none",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers():\n    yield 'topk'",
            "forge_routers: it must yield descriptions of type Component, not a str",
            id="a string for a component",
        ),
        pytest.param(
            "@hookimpl\ndef forge_parallel_passes():\n"
            "    yield Component(name='tp', summary='s', factory='a:b', config='a:c')",
            "forge_parallel_passes: it must yield descriptions of type PassComponent, not a Component",
            id="the wrong descriptor",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers():\n"
            "    yield Component(name='good', summary='s', factory='a:b', config='a:c')\n"
            "    yield Component(name='Top K', summary='s', factory='a:b', config='a:c')",
            "forge_routers: ValueError: name must be lower-case words joined by '_' or '-', got 'Top K'",
            id="a bad name after a good one",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers():\n"
            "    yield Component(name='a', summary='s', factory='a:b', modules=['scipy>=1'])",
            "forge_routers: ValueError: modules must be names as import has them, got 'scipy>=1'",
            id="a requirement for a module",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers():\n"
            "    yield Component(name='a', summary='s', factory='a:b', deprecated=True)",
            "forge_routers: ValueError: deprecated must be a sentence, got True",
            id="a deprecation that does not say what to use",
        ),
        pytest.param(
            "@hookimpl\ndef forge_routers():\n"
            "    yield Component(name='a', summary='s', factory='a:b', config='a:c')\n"
            "    yield Component(name='b', aliases=['a'], summary='s', factory='a:b', config='a:c')",
            "forge_routers yields the name 'a' 2 times",
            id="a name twice",
        ),
        pytest.param(
            "@hookimpl\ndef forge_commands():\n    yield Command(name='run', summary='s', run='a:b')",
            "its command 'run' would replace the core's",
            id="a core command",
        ),
        pytest.param(
            "@hookimpl\ndef forge_kinds():\n"
            "    yield Kind(name='router', hook='forge_my_routers', summary='s', contract='a:B')",
            "adds 'router', which the core has already",
            id="a core kind",
        ),
        pytest.param(
            "@hookimpl(wrapper=True)\ndef forge_routers():\n    yield",
            "forge_routers: it may not be a wrapper",
            id="a wrapper",
        ),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_broken_and_says_where(make_distribution, source, reason):
    plugin = broken(make_distribution, HOOK + source)

    assert (plugin.status, plugin.reason) == ("broken", reason)


def test_hook_arguments_that_do_not_exist_are_named(make_distribution):
    plugin = broken(make_distribution, HOOK + "@hookimpl\ndef forge_routers(registry): return []")

    assert plugin.status == "broken"
    assert "registry" in plugin.reason


def test_a_late_failure_withdraws_everything_the_plugin_gave_before(make_distribution):
    more = "    @hookimpl\n    def forge_trackers():\n        yield 1 / 0\n"
    make_distribution("acme", files=router_plugin("acme", more=more))

    plugin = find("acme")

    assert (plugin.status, plugin.components) == ("broken", ())
    assert plugin.reason == "forge_trackers: ZeroDivisionError: division by zero"


def test_two_entry_points_in_one_distribution_are_refused(make_distribution):
    points = "[forge.v1]\na = acme.plugin\nb = acme.other\n"
    make_distribution("acme", files=router_plugin("acme") | {"entry_points.txt": points})

    assert find("acme").reason == "has 2 entry points in the group forge.v1 (a, b); one is allowed"


def test_two_distributions_may_not_share_a_plugin_module(make_distribution):
    make_distribution("acme", files=router_plugin("acme"))
    make_distribution("acme-fork", files={"entry_points.txt": "[forge.v1]\nx = acme.plugin\n"})

    assert find("acme").status == "ok"
    assert find("acme-fork").reason == "its plugin module 'acme.plugin' is also the one of acme"


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("forge.v2", "needs plugin API v2, this is forge-core 0.1.0 (API 1.5): pip install --upgrade forge-core"),
        ("forge.v0", "was written for plugin API v0, this is forge-core 0.1.0 (API 1.5): pip install --upgrade acme"),
    ],
)
def test_another_major_version_is_incompatible_and_not_imported(make_distribution, group, reason):
    make_distribution("acme", files={"acme/plugin.py": "raise RuntimeError"}, group=group)

    plugin = find("acme")

    assert (plugin.status, plugin.reason) == ("incompatible", reason)
    assert "acme.plugin" not in sys.modules


@pytest.mark.parametrize(
    ("asked", "upgrade"),
    [
        ("<0.3,>=0.2", "forge-core"),
        (">=0.0.5,<0.1.0", "acme"),
        (" (<0.1,>=0.0)", "acme"),
    ],
)
def test_a_core_outside_of_what_the_metadata_ask_for_is_told(make_distribution, asked, upgrade):
    site = make_distribution("acme", files={"acme/plugin.py": "raise RuntimeError"})
    (information,) = site.glob("*.dist-info/METADATA")
    information.write_text(
        f"{information.read_text()}Requires-Dist: forge-core{asked}\n\nRequires-Dist: forge-core>9\n"
    )

    plugin = find("acme")

    words = f"needs forge-core{asked.strip(' ()')}, this is forge-core 0.1.0 (API 1.5): pip install --upgrade {upgrade}"
    assert (plugin.status, plugin.reason) == ("incompatible", words)
    assert "acme.plugin" not in sys.modules


@pytest.mark.parametrize(
    "asked", ["", "<0.2,>=0.1", ">=0.1.0,<0.1.1", "~=0.1", "==0.1.*", "<1", ">=9,<10; extra == 'x'", " @ file:x"]
)
def test_a_core_within_is_not(make_distribution, asked):
    site = make_distribution("acme", files=router_plugin("acme"))
    (information,) = site.glob("*.dist-info/METADATA")
    information.write_text(f"{information.read_text()}Requires-Dist: forge-core{asked}\n\n")

    assert find("acme").status == "ok"


def test_a_plugin_may_serve_several_major_versions(make_distribution):
    points = "[forge.v1]\na = acme.plugin\n[forge.v2]\na = acme.plugin2\n"
    make_distribution("acme", files=router_plugin("acme") | {"entry_points.txt": points})

    assert find("acme").status == "ok"


@pytest.mark.parametrize("body", ["", "from forge_core.api import SomethingOfALaterMinor\n"])
def test_a_later_minor_version_is_incompatible_even_if_the_import_fails(make_distribution, body):
    plugin = broken(make_distribution, f'FORGE_API = "1.7"\n{body}')

    assert plugin.status == "incompatible"
    assert plugin.reason.startswith("needs plugin API >= 1.7, this is forge-core 0.1.0 (API 1.5)")


@pytest.mark.parametrize("stated", ["1.0.0", "1", 1.0, "2.0", "1." + "9" * 5000])
def test_a_malformed_or_contradictory_api_version_is_an_error(make_distribution, stated):
    plugin = broken(make_distribution, f"FORGE_API = {stated!r}")

    assert plugin.status == "broken"
    assert plugin.reason.startswith("FORGE_API")


def test_disabled_plugins_are_listed_and_not_imported(make_distribution, monkeypatch):
    make_distribution("acme-one", files=router_plugin("acme_one"))
    make_distribution("acme-two", files=router_plugin("acme_two"))
    monkeypatch.setenv("FORGE_DISABLE_PLUGINS", "x, Acme_Two")

    status = {plugin.distribution: plugin.status for plugin in discover(disable=["acme.ONE"]).plugins}

    assert status["acme-one"] == status["acme-two"] == "disabled"
    assert not {"acme_one.plugin", "acme_two.plugin"} & set(sys.modules)
    assert find("acme-one").status == "ok"


KIND = """
    from forge_core.api import Component, Kind, hookimpl

    @hookimpl
    def forge_kinds():
        yield Kind(name="sound_encoder", hook="forge_sound_encoders", summary="images in", contract="a.b:C")
"""
ENCODER = """
    from forge_core.api import Component, hookimpl

    @hookimpl({options})
    def forge_sound_encoders({arguments}):
        yield Component(name="patches", summary="patches", factory="a.b:c", config="a.b:d")
"""


@pytest.mark.parametrize(("adder", "user"), [("acme-a", "acme-z"), ("acme-z", "acme-a")])
def test_a_kind_can_be_added_and_used_by_two_plugins_in_any_order(make_distribution, adder, user):
    make_distribution(adder, files={f"{adder.replace('-', '_')}/plugin.py": KIND})
    encoder = ENCODER.format(options="", arguments="")
    make_distribution(user, files={f"{user.replace('-', '_')}/plugin.py": encoder})

    catalog = discover()

    assert catalog.kinds["sound_encoder"].hook == "forge_sound_encoders"
    assert catalog.lookup("sound_encoder", "patches").qualified_name == f"{user}:patches"


def test_an_implementation_that_does_not_fit_an_added_kind_breaks_its_own_plugin_only(make_distribution):
    make_distribution("acme-kinds", files={"acme_kinds/plugin.py": KIND})
    make_distribution("acme-bad", files={"acme_bad/plugin.py": ENCODER.format(options="", arguments="self")})

    assert find("acme-kinds").status == "ok"
    assert find("acme-bad").reason == "forge_sound_encoders takes no arguments and may not be a wrapper"


def test_an_optional_hook_of_a_kind_that_is_not_installed_is_left_alone(make_distribution):
    encoder = ENCODER.format(options="optionalhook=True", arguments="")
    make_distribution("acme", files={"acme/plugin.py": encoder})

    assert (find("acme").status, find("acme").components) == ("ok", ())


def test_a_kind_that_two_plugins_add_is_refused_for_both(make_distribution):
    make_distribution("acme-a", files={"acme_a/plugin.py": KIND})
    make_distribution("acme-b", files={"acme_b/plugin.py": KIND})

    assert find("acme-a").reason == "adds 'sound_encoder', which acme-b adds as well; disable one"
    assert find("acme-b").reason == "adds 'sound_encoder', which acme-a adds as well; disable one"
    assert find("acme-b", disable=["acme-a"]).status == "ok"


def test_heavy_imports_of_a_plugin_module_are_noticed(make_distribution):
    files = {"acme/plugin.py": "import tensorflow", "tensorflow/core.py": ""}
    make_distribution("acme", files=files)

    assert find("acme").heavy == ("tensorflow",)


def test_what_a_plugin_prints_goes_to_the_error_stream_with_its_name(make_distribution, capsys):
    printing = "print('hello')\nprint('no newline', end='')\n"
    hook = """
@hookimpl
def forge_losses():
    print("from a generator")
    yield Component(name="l", summary="s", factory="acme.loud:make", config="acme.loud:Config")
"""
    loud = printing + "import attrs\n\n@attrs.frozen\nclass Config:\n    pass\n"
    make_distribution(
        "acme",
        files={
            "acme/plugin.py": f"from forge_core.api import Component, hookimpl\n{printing}{hook}",
            "acme/loud.py": loud,
        },
    )

    assert main(["plugins", "--json"]) == 0
    listed = capsys.readouterr()
    assert main(["plugins", "show", "loss", "l"]) == 0
    shown = capsys.readouterr()

    assert json.loads(listed.out)["plugins"]
    assert listed.err == "acme: hello\nacme: no newline\nacme: from a generator\n"
    assert "hello" not in shown.out
    assert shown.err.count("acme 1.0: hello\n") == 1, "the module of its configuration, imported for the first time"


def test_a_plugin_that_takes_long_to_import_is_marked_and_noted_by_other_commands(
    make_distribution, capsys, monkeypatch, tmp_path
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    make_distribution("acme", files={"acme/plugin.py": "import time\ntime.sleep(0.6)\n"})

    main(["plugins"])
    listed = capsys.readouterr()
    for module in ("acme.plugin", "acme"):
        del sys.modules[module]
    main(["validate", str(tmp_path / "nothing.toml")])
    main(["plugins", "show", "tracker", "x"])
    others = capsys.readouterr().err

    assert re.search(r"^acme +1\.0 +ok, slow +\d+\.\dms", listed.out, re.MULTILINE)
    assert re.search(r"warning: importing acme takes \d+\.\d", listed.out)
    assert "takes" not in listed.err
    assert re.search(r"^note: importing acme 1\.0 takes \d+\.\d s, for which every forge command waits$", others, re.M)
