"""Keys of a component that has no config class are the parameters of its factory, by the source alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.config.converter import config_class
from forge_core.config.field_docs import field_docs
from forge_core.config.unstructure import plain
from forge_core.errors import ConfigError, PluginError
from forge_core.registry.discovery import discover
from forge_plugins_monitor.schema import job_schema

PLUGIN = """
    from forge_core.api import Component

    components = [
        Component(kind="{kind}", name="sig", summary="s", factory="{package}.made:{factory}"),
    ]
"""

SCHEDULE = '''
    import torch  # reading the signature may not import it
    from pathlib import Path
    from typing import Annotated, Literal

    from attrs.validators import ge, le

    SHAPES = Literal["linear", "cosine"]
    HALF: float = 0.5

    def trapezoid(
        *,
        total_steps: int,
        warmup: Annotated[int, ge(0), le(100)] = 0,
        shape: SHAPES = "linear",
        floor: float = HALF,
        table: "Path | None" = None,
        more: tuple[int, ...] = (),
    ):
        """A trapezoid.

        Args:
            warmup: Steps over which
                the rate rises.
            floor: The least rate.
        """
        return lambda step: floor + warmup * step / total_steps
'''


@pytest.fixture
def provide(make_distribution):
    """A plugin of one component with this source; returns its builder and its entry."""

    def provide(package: str, source: str, factory: str, kind: str = "scheduler"):
        files = {f"{package}/plugin.py": PLUGIN.format(package=package, factory=factory, kind=kind)}
        make_distribution(package.replace("_", "-"), files=files | {f"{package}/made.py": source})
        catalog = discover()
        (entry,) = [one for one in catalog.components(kind) if one.component.name == "sig"]
        return ComponentBuilder(catalog), entry, catalog

    return provide


def test_annotations_defaults_validators_and_docstrings_are_those_of_the_parameters(provide):
    build, entry, catalog = provide("acme_keys", SCHEDULE, "trapezoid")

    use = build.resolve("scheduler", {"name": "sig", "warmup": 3, "table": "a/b.txt", "more": [1, 2]})
    keys, takes = config_class(entry, catalog.kinds["scheduler"])

    assert plain(use) == {
        "name": "acme-keys:sig",
        "warmup": 3,
        "shape": "linear",
        "floor": 0.5,
        "table": "a/b.txt",
        "more": [1, 2],
    }
    assert build.resolve("scheduler", plain(use)) == use
    assert build(use, total_steps=6, tokens_per_step=1)(2) == 1.5
    assert field_docs(keys) == {"warmup": "Steps over which the rate rises.", "floor": "The least rate."}
    assert takes == {"total_steps", "warmup", "shape", "floor", "table", "more"}


def test_what_a_job_says_wrong_is_told_as_of_a_config_class(provide):
    build, _, _ = provide("acme_wrong_keys", SCHEDULE, "trapezoid")

    with pytest.raises(ConfigError) as raised:
        build.resolve("scheduler", {"name": "sig", "warmup": 101, "warmpu": 1, "shape": "line", "floor": "1"})
    text = str(raised.value)
    assert "scheduler.warmpu: unknown key; did you mean 'warmup'?" in text
    assert "scheduler.shape: the string \"line\" is not allowed; did you mean 'linear'?" in text
    assert 'scheduler.floor: expected a number, got the string "1"' in text
    with pytest.raises(ConfigError, match=r"scheduler.warmup: must be at most 100, got 101"):
        build.resolve("scheduler", {"name": "sig", "warmup": 101})


def test_schema_and_plugins_show_have_the_keys(provide, capsys):
    _, _, catalog = provide("acme_shown", SCHEDULE, "trapezoid")

    table = job_schema(catalog)["$defs"]["scheduler.acme-shown:sig"]

    assert table["properties"]["warmup"] == {
        "description": "Steps over which the rate rises.",
        "type": "integer",
        "minimum": 0,
        "maximum": 100,
        "default": 0,
    }
    assert table["additionalProperties"] is False
    assert main(["plugins", "show", "scheduler", "sig"]) == 0
    assert "The least rate." in capsys.readouterr().out


def test_reading_a_signature_imports_neither_the_factory_nor_torch(make_distribution):
    plugin = PLUGIN.format(package="acme_light", factory="trapezoid", kind="scheduler")
    site = make_distribution("acme-light", files={"acme_light/plugin.py": plugin, "acme_light/made.py": SCHEDULE})
    program = (
        "import json, sys\n"
        "from forge_core.config.builder import ComponentBuilder\n"
        "from forge_core.registry.discovery import discover\n"
        "use = ComponentBuilder(discover()).resolve('scheduler', 'sig')\n"
        "print(json.dumps([name in sys.modules for name in ('torch', 'acme_light.made')]), use.config.floor)"
    )
    path = [str(site), *(entry for entry in sys.path if entry)]
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{program}"], capture_output=True, text=True
    )
    assert found.stdout == f"{json.dumps([False, False])} 0.5\n", found.stderr


ROUTERS = '''
    import torch
    from torch import nn

    class Base(nn.Module):
        """Args:
            temperature: Of the scores.
        """

        def __init__(self, *, dim: int, n_experts: int, temperature: float = 1.0):
            super().__init__()
            self.said = (dim, n_experts, temperature)

    class Plain(Base):
        """No keys of its own."""

    class Passing(Base):
        def __init__(self, *, noise: float = 0.0, **others):
            super().__init__(**others)
            self.noise = noise

    class Alone(nn.Module):
        def __init__(self, *, dim: int, **_):
            super().__init__()
            self.dim = dim
'''


@pytest.mark.parametrize(
    ("factory", "keys", "attributes"),
    [
        ("Plain", {"temperature": 2.0}, {"said": (4, 8, 2.0)}),
        ("Passing", {"temperature": 2.0, "noise": 0.5}, {"said": (4, 8, 2.0), "noise": 0.5}),
        ("Alone", {}, {"dim": 4}),
    ],
)
def test_a_class_has_the_keys_of_its_bases_as_far_as_it_passes_them_on(provide, factory, keys, attributes):
    build, _, _ = provide(f"acme_bases_{factory.lower()}", ROUTERS, factory, "router")

    use = build.resolve("router", {"name": "sig", **keys})
    built = build(use, dim=4, n_experts=8)

    assert plain(use.config) == keys
    assert {name: getattr(built, name) for name in attributes} == attributes


def test_a_base_class_of_another_module_gives_its_keys(make_distribution):
    source = """
        from . import bases as b

        class Own(b.Base):
            pass
    """
    plugin = PLUGIN.format(package="acme_far", factory="Own", kind="router")
    files = {"acme_far/plugin.py": plugin, "acme_far/made.py": source, "acme_far/bases.py": ROUTERS}
    make_distribution("acme-far", files=files)

    use = ComponentBuilder(discover()).resolve("router", {"name": "sig", "temperature": 3.0})

    assert use.config.temperature == 3.0


def test_a_slot_is_a_component_within_and_a_data_source_has_the_keys_of_all(provide):
    source = """
        from typing import Annotated
        from forge_core.api import ComponentRef, Slot

        class Source:
            def __init__(self, *, seq_len: int, build, tokenizer: Annotated[ComponentRef, Slot("tokenizer")],
                         size: int = 8):
                self.made = (seq_len, build, tokenizer.name, size)
    """
    build, _, _ = provide("acme_slots", source, "Source", "data_source")

    use = build.resolve("data_source", {"name": "sig", "tokenizer": "bytes", "shuffle": False})
    built = build(use, seq_len=4, split="train", seed=0, samples_per_step=1, phases=())

    assert built.made == (4, build, "bytes", 8)
    assert (use.config.shuffle, use.config.workers) == (False, 1)


UNREADABLE = {
    "by position": ("def f(a, *, b: int = 1): ...", "the parameter 'a' can be given by position; write '*' before it"),
    "no annotation": ("def f(*, b=1): ...", "the parameter 'b' cannot be a key: it has no annotation"),
    "no type": (
        "import decimal\ndef f(*, b: decimal.Decimal): ...",
        "the parameter 'b' cannot be a key: decimal.Decimal is no type of a configuration",
    ),
    "heavy": (
        "import torch\ndef f(*, b: torch.dtype): ...",
        "the parameter 'b' cannot be a key: 'torch' comes from torch, which takes long to import",
    ),
    "unknown name": ("def f(*, b: Foo = 1): ...", "the parameter 'b' cannot be a key: 'Foo' is neither imported nor"),
    "changeable": ("def f(*, b: list[int] = [1]): ...", "its default can be changed; write a tuple"),
    "called name": ("def f(*, name: str): ...", "the key of this name chooses the component"),
    "not defined": ("import functools\nf = functools.partial(print)", "its signature cannot be read from the source"),
    "decorated": ("import attrs\n@attrs.define\nclass f:\n    a: int = 1", "it has a decorator and no __init__"),
    "syntax": ("def f(*, b: int = ): ...", "line 1: expected default value"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_signature_that_cannot_be_read_is_told_with_its_parameter(provide, case):
    source, sentence = UNREADABLE[case]
    package = f"acme_unreadable_{case.replace(' ', '_')}"
    build, _, _ = provide(package, source, "f")

    with pytest.raises((ConfigError, PluginError)) as raised:
        build.resolve("scheduler", "sig")
    assert sentence in str(raised.value)
    assert package.replace("_", "-") in str(raised.value)


def test_a_kind_without_a_protocol_of_its_factory_needs_config_classes(make_distribution):
    plugin = """
        from forge_core.api import Component, Kind, hookimpl

        @hookimpl
        def forge_kinds():
            yield Kind(name="thing", hook="forge_things", summary="s", contract="acme_thing.contract:Thing")

        components = [Component(kind="thing", name="sig", summary="s", factory="acme_thing.made:make")]
    """
    files = {"acme_thing/plugin.py": plugin, "acme_thing/contract.py": "class Thing: ...", "acme_thing/made.py": ""}
    make_distribution("acme-thing", files=files | {"acme_thing/made.py": "def make(*, a: int = 1): ..."})

    with pytest.raises(ConfigError, match="has no protocol of a factory, so that a thing needs a"):
        ComponentBuilder(discover()).resolve("thing", "sig")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (
            'Component(kind="rooter", name="a", summary="s", factory="b:c")',
            "'a' has the kind 'rooter', which is none. Did you mean 'router'?",
        ),
        ('Component(name="a", summary="s", factory="b:c")', "'a' has the kind '', which is none. Kinds: model, "),
        (
            'Component(kind="parallel_pass", name="a", summary="s", factory="b:c")',
            "must be a PassComponent, not a C",
        ),
        ('"router"', "it must hold descriptions of type Component, not a str"),
    ],
)
def test_a_list_of_components_that_means_nothing_breaks_its_plugin(make_distribution, entry, reason):
    source = f"from forge_core.api import Component\ncomponents = [{entry}]"
    make_distribution("acme-listed", files={"acme_listed/plugin.py": source})

    (plugin,) = [one for one in discover().plugins if one.distribution == "acme-listed"]

    assert plugin.status == "broken"
    assert reason in plugin.reason


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ('Component(kind="router", name="a", summary="s", factory="b:c")', "a Component"),
        ('{"a": Component(kind="router", name="a", summary="s", factory="b:c")}', "a dict"),
        ('(Component(kind="router", name=name, summary="s", factory="b:c") for name in "ab")', "a generator"),
    ],
)
def test_components_that_are_no_list_break_their_plugin(make_distribution, written, what):
    source = f"from forge_core.api import Component\ncomponents = {written}"
    make_distribution("acme-unlisted", files={"acme_unlisted/plugin.py": source})

    (plugin,) = [one for one in discover().plugins if one.distribution == "acme-unlisted"]

    assert plugin.reason == f"components: it must be a list of descriptions, not {what}"


def test_a_function_or_a_module_may_be_called_components(make_distribution):
    for name, source in (
        ("acme-function", "def components(): return []"),
        ("acme-module", "import json as components"),
    ):
        make_distribution(name, files={f"{name.replace('-', '_')}/plugin.py": source})

    assert {one.status for one in discover().plugins if one.distribution.startswith("acme-")} == {"ok"}


def test_a_name_that_is_listed_and_yielded_breaks_its_plugin(make_distribution):
    source = """
        from forge_core.api import Component, hookimpl

        components = [Component(kind="router", name="a", summary="s", factory="b:c")]

        @hookimpl
        def forge_routers():
            yield Component(name="a", summary="s", factory="b:c")
    """
    make_distribution("acme-twice", files={"acme_twice/plugin.py": source})

    (plugin,) = [one for one in discover().plugins if one.distribution == "acme-twice"]

    assert plugin.reason == "forge_routers yields the name 'a' 2 times"


def test_a_hook_that_yields_what_is_of_another_kind_breaks_its_plugin(make_distribution):
    source = """
        from forge_core.api import Component, hookimpl

        @hookimpl
        def forge_routers():
            yield Component(kind="loss", name="a", summary="s", factory="b:c")
    """
    make_distribution("acme-other-kind", files={"acme_other_kind/plugin.py": source})

    (plugin,) = [one for one in discover().plugins if one.distribution == "acme-other-kind"]

    assert (plugin.status, plugin.reason) == ("broken", "a hook for router yields 'a', of the kind loss")


def test_a_data_source_without_a_fingerprint_has_one_of_its_keys_its_files_and_the_length(provide, tmp_path):
    source = """
        from pathlib import Path

        class Source:
            def __init__(self, *, seq_len: int, path: Path, size: int = 8):
                pass
    """
    build, _, _ = provide("acme_prints", source, "Source", "data_source")
    (tmp_path / "a.bin").write_bytes(b"123")

    def fingerprint(path, seq_len=4, **keys):
        use = build.resolve("data_source", {"name": "sig", "path": str(path), **keys})
        return build(use, seq_len=seq_len, split="train", seed=0, samples_per_step=1, phases=()).fingerprint

    before = {fingerprint(tmp_path), fingerprint(tmp_path / "a.bin")}
    assert fingerprint(tmp_path) in before
    assert {fingerprint(tmp_path, seq_len=5), fingerprint(tmp_path, size=9)}.isdisjoint(before)
    (tmp_path / "a.bin").write_bytes(b"1234")
    assert {fingerprint(tmp_path), fingerprint(tmp_path / "a.bin")}.isdisjoint(before)
