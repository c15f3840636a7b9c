"""A config class may rewrite its table before it is typed; whoever wrote a shorthand reads about the shorthand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import pytest
from attrs.validators import gt

from forge_core.api import Component, ComponentRef, Slot
from forge_core.config.converter import structure
from forge_core.errors import ConfigError
from forge_core.job import components, deprecations, dump_job, load_job
from forge_core.registry.catalog import Catalog, Plugin

if TYPE_CHECKING:
    from forge_core.config.sections import Job

JOB = """\
[model]
name = "deep"
width = 64

[data]
name = "text"
path = "corpus"

[train]
steps = 10
seq_len = 128
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3
"""


@attrs.frozen(kw_only=True)
class DeepConfig:
    """``width = 64`` stands for ``outer = {name = "wide", dim = 64}``."""

    outer: Annotated[ComponentRef, Slot("feed_forward")]
    width: int | None = None

    @classmethod
    def expand(cls, table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        if "width" not in table:
            return table, {}
        rest = {key: value for key, value in table.items() if key != "width"}
        return {**rest, "outer": {"name": "wide", "dim": table["width"]}}, {"outer": "width", "outer.dim": "width"}


@attrs.frozen(kw_only=True)
class WideConfig:
    """``twice = 3`` stands for ``inner = {name = "moe", n_experts = 6}``."""

    dim: int = attrs.field(default=1, validator=gt(0))
    inner: Annotated[ComponentRef | None, Slot("feed_forward")] = None
    twice: dict[str, Any] | None = None

    @classmethod
    def expand(cls, table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        if "twice" not in table:
            return table, {}
        rest = {key: value for key, value in table.items() if key != "twice"}
        keys = {"router": "hash", **table["twice"]}
        return {**rest, "inner": {"name": "moe", **keys}}, {"inner": "twice"}

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        if self.dim % 8:
            yield "dim", f"{self.dim} is odd"


@attrs.frozen(kw_only=True)
class BrokenConfig:
    @classmethod
    def expand(cls, table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        raise KeyError("oops")


@pytest.fixture(scope="module")
def catalog(catalog: Catalog) -> Catalog:
    def component(name: str, config: str, **more: Any) -> Component:
        return Component(name=name, summary=name, factory="builtins:dict", config=f"{__name__}:{config}", **more)

    deep = (
        ("model", component("deep", "DeepConfig")),
        ("model", component("broken", "BrokenConfig")),
        ("feed_forward", component("wide", "WideConfig", deprecated="use 'mlp'")),
    )
    return Catalog([*catalog.plugins, Plugin(distribution="deep", version="1.0", components=deep)])


@pytest.fixture
def load(write, catalog):
    return lambda *settings: load_job(write(JOB), settings, catalog=catalog)


@pytest.fixture
def complaint(load):
    def complaint(*settings: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*settings)
        return str(caught.value)

    return complaint


def test_a_job_has_the_form_that_is_written_out(load, write, catalog):
    job = load()

    assert job.model.config.outer.config.dim == 64
    assert "width" not in dump_job(job)
    assert load_job(write(dump_job(job)), catalog=catalog) == job


def test_layers_are_merged_before_shorthands_are_written_out(load):
    assert load("model.width=128").model.config.outer.config.dim == 128


def test_a_wrong_type_is_reported_where_the_shorthand_stands(complaint):
    assert complaint("model.width=wide") == 'model.width=wide: model.width: expected an integer, got the string "wide"'


def test_a_validator_is_reported_where_the_shorthand_stands(load, write, catalog):
    with pytest.raises(ConfigError, match=r"^job\.toml:3: model\.width: must be greater than 0, got -8$"):
        load_job(write(JOB.replace("64", "-8")), catalog=catalog)


def test_what_is_found_after_typing_is_reported_there_too(complaint):
    assert complaint("model.width=63") == "model.width=63: model.width: 63 is odd"


def test_a_component_that_is_not_there_is_reported_where_the_shorthand_stands(write, catalog):
    without = Catalog([plugin for plugin in catalog.plugins if plugin.distribution != "forge-moe"])

    with pytest.raises(ConfigError, match=r"^job\.toml:5: model\.outer\.twice: .*feed forward 'moe'"):
        load_job(write(INNER), catalog=without)


INNER = JOB.replace("width = 64", 'outer.name = "wide"\n\n[model.outer.twice]\nn_experts = 6')


def test_problems_find_their_way_through_shorthands_within_shorthands(write, catalog):
    with pytest.raises(ConfigError) as caught:
        load_job(write(INNER), ["parallel.ep=4", "model.outer.dim=9"], catalog=catalog)

    assert [str(problem) for problem in caught.value.problems] == [
        "job.toml:6: model.outer.twice.n_experts: 6 experts cannot be shared out to parallel.ep = 4 ranks",
        "model.outer.dim=9: model.outer.dim: 9 is odd",
    ]


def test_an_unknown_key_is_named_as_it_was_written(write, catalog):
    with pytest.raises(ConfigError, match=r"^job\.toml:6: model\.outer\.twice\.n_expert: unknown key; did you mean"):
        load_job(write(INNER.replace("n_experts", "n_expert")), catalog=catalog)


def test_a_deprecation_is_about_what_was_written(load, catalog):
    (line,) = deprecations(load(), catalog)

    assert line.startswith("model.width: 'wide' of deep 1.0 is deprecated")


def test_a_mistake_of_the_plugin_is_called_that(complaint):
    assert "fails (KeyError: 'oops'). This is a bug in deep" in complaint("model={name='broken'}")


def test_what_was_written_does_not_make_a_job_another_one(catalog):
    short, long = (
        structure({"name": "deep", **keys}, Annotated[ComponentRef, Slot("model")], catalog)
        for keys in ({"width": 8}, {"outer": {"name": "wide", "dim": 8}})
    )

    assert short == long
    assert hash(short) == hash(long)
    assert short.written
    assert not long.written


def test_components_are_listed_with_the_paths_of_the_form_that_is_written_out(load):
    paths = [path for path, _ in components(load())]

    assert [path for path in paths if path[0] == "model"] == [("model",), ("model", "outer")]
