"""Passes are chosen by what the job needs and ordered by what they declare, never by the order of the config."""

from __future__ import annotations

from itertools import permutations

import attrs
import pytest

from forge_core.config.sections import Job, ParallelSection, TrainSection
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.passes.order import add_required, required_capabilities, resolve_degrees, sort_passes
from forge_core.registry.catalog import Catalog, Plugin
from forge_core.registry.component import Conflict, Need, PassComponent


def declare(name: str, phase: str = "shard", **declared) -> PassComponent:
    return PassComponent(name=name, summary=f"{name} it", factory="a.b:c", config="a.b:D", phase=phase, **declared)


def catalog(*passes: PassComponent, **by_distribution: list[PassComponent]) -> Catalog:
    plugins = {"acme": list(passes), **by_distribution}
    return Catalog(
        Plugin(distribution=name, version="1.0", components=tuple(("parallel_pass", one) for one in components))
        for name, components in plugins.items()
    )


def use(name: str, provider: str = "acme") -> ComponentRef:
    return ComponentRef(kind="parallel_pass", name=name, provider=provider, factory="a.b:c", config=None)


def job(passes: dict[str, ComponentRef | None], precision: str = "fp32", **degrees: int) -> Job:
    def choice(kind: str) -> ComponentRef:
        return ComponentRef(kind=kind, name="any", provider="acme", factory="a.b:c", config=None)

    return Job(
        model=choice("model"),
        data=choice("data_source"),
        train=TrainSection(steps=1, seq_len=8, precision=precision),
        optimizer=choice("optimizer"),
        scheduler=choice("scheduler"),
        loss=choice("loss"),
        parallel=ParallelSection(passes=passes, **degrees),
    )


def order(*passes: PassComponent) -> list[str]:
    return [one.name for one in sort_passes(job({one.name: use(one.name) for one in passes}), catalog(*passes))]


def refusal(*passes: PassComponent) -> str:
    with pytest.raises(ConfigError) as raised:
        order(*passes)
    return str(raised.value)


def test_phases_decide_then_declarations_then_names_whatever_the_config_says():
    passes = [
        declare("fsdp", "fsdp"),
        declare("compile", "compile"),
        declare("zoom", "shard"),
        declare("cp", "shard", after=["tp"]),
        declare("tp", "shard"),
        declare("adapters", "swap", before=["fp8"]),
        declare("fp8", "swap"),
        declare("pipeline", "split"),
    ]
    expected = ["pipeline", "tp", "cp", "zoom", "adapters", "fp8", "compile", "fsdp"]

    for shuffled in list(permutations(passes))[::997]:
        assert order(*shuffled) == expected


def test_an_alias_is_as_good_as_a_name_in_a_declaration():
    assert order(declare("a", after=["old_b"]), declare("b", aliases=["old_b"])) == ["b", "a"]


def test_a_neighbour_that_is_not_there_does_not_matter_unless_it_is_needed():
    assert order(declare("a", after=["nobody"])) == ["a"]
    assert refusal(declare("a", needs=["b"])) == (
        "parallel.passes.a: it needs the pass 'b'; add b = true under [parallel.passes]"
    )


def test_passes_that_are_switched_off_are_not_there():
    both = catalog(declare("a"), declare("b"))

    assert [one.name for one in sort_passes(job({"a": use("a"), "b": None}), both)] == ["a"]


def test_a_cycle_is_named():
    message = refusal(declare("a", after=["b"]), declare("b", after=["c"]), declare("c", after=["a"]))

    assert message.startswith("parallel.passes: each of ")
    assert message.count("'acme:") == 4


def test_a_wish_against_the_phases_is_a_bug_of_a_plugin():
    message = refusal(declare("early", "split", after=["late"]), declare("late", "fsdp"))

    assert message == (
        "parallel.passes.early: it says that it comes after 'late', but its phase 'split' comes before 'fsdp'. This "
        "is a bug in one of the two plugins."
    )


def test_all_problems_are_reported_at_once_and_a_mutual_conflict_once():
    message = refusal(
        declare("a", conflicts=[Conflict("b", "both own the weights")]),
        declare("b", conflicts=[Conflict("a", "both own the weights")], needs=["x"]),
    )

    assert message.splitlines() == [
        "parallel.passes.b: it needs the pass 'x'; add x = true under [parallel.passes]",
        "parallel.passes.a: it cannot be combined with 'b': both own the weights",
    ]


@attrs.frozen(kw_only=True)
class Keys:
    mode: str = "plain"
    deep: bool = False


def said(declared: list[PassComponent], configs: dict[str, Keys], world_size: int | None = None, **asked) -> list[str]:
    """What sorting has against a job with these passes, line by line."""
    uses = {one.name: attrs.evolve(use(one.name), config=configs.get(one.name, Keys())) for one in declared}
    try:
        sort_passes(job(uses, **asked), catalog(*declared), world_size)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_conflict_may_depend_on_keys_of_both_passes():
    conflict = Conflict("b", "they clash", when={"mode": ("fast", "wild"), "deep": True}, other_when={"mode": "odd"})
    both = [declare("a", conflicts=[conflict]), declare("b")]

    assert said(both, {"a": Keys(mode="wild", deep=True), "b": Keys(mode="odd")}) == [
        'parallel.passes.a.mode: "wild" with deep = true cannot be combined with mode = "odd" of \'b\': they clash'
    ]
    assert said(both, {"a": Keys(mode="wild", deep=True)}) == []
    assert said(both, {"a": Keys(mode="wild"), "b": Keys(mode="odd")}) == []
    assert said(both, {"a": Keys(deep=True), "b": Keys(mode="odd")}) == []
    assert said(both[:1], {"a": Keys(mode="wild", deep=True)}) == []


def test_two_conflicts_of_one_pair_are_both_told():
    conflicts = [Conflict("b", "they clash", when={"deep": True}), Conflict("b", "they differ", when={"mode": "odd"})]

    lines = said([declare("a", conflicts=conflicts), declare("b")], {"a": Keys(mode="odd", deep=True)})

    assert [line.rpartition(": ")[2] for line in lines] == ["they clash", "they differ"]


def test_a_conflict_with_an_axis_is_one_with_more_than_one_rank_along_it():
    a = [declare("a", conflicts=[Conflict("parallel.dp_shard", "it is whole"), Conflict("parallel.ep", "no experts")])]

    assert said(a, {}, 4, ep=2) == [
        "parallel.passes.a: it cannot be combined with parallel.dp_shard = 4: it is whole",
        "parallel.passes.a: it cannot be combined with parallel.ep = 2: no experts",
    ]
    assert said(a, {}, 1) == []
    assert said(a, {}) == []


def test_a_conflict_with_a_setting_names_the_values_of_it():
    a = [declare("a", conflicts=[Conflict("train.precision", "it rounds", values=("fp32",), when={"deep": False})])]

    assert said(a, {}) == ['parallel.passes.a.deep: false cannot be combined with train.precision = "fp32": it rounds']
    assert said(a, {}, precision="bf16") == []
    assert said(a, {"a": Keys(deep=True)}) == []


def test_a_need_may_depend_on_keys():
    needs = ["c", Need("b", "it counts", when={"deep": True})]
    declared = [declare("a", needs=needs), declare("b"), declare("c")]

    assert said([declared[0], declared[2]], {"a": Keys(deep=True)}) == [
        "parallel.passes.a.deep: true needs the pass 'b': it counts; add b = true under [parallel.passes]"
    ]
    assert said([declared[0], declared[2]], {}) == []
    assert said(declared, {"a": Keys(deep=True)}) == []


def test_what_a_key_needs_is_not_added_without_being_asked_for():
    a = declare("a", needs=[Need("b", "it counts", when={"deep": True})])
    deep = attrs.evolve(use("a"), config=Keys(deep=True))

    assert set(complete(job({"a": deep}), catalog(a, declare("b")))) == {"a"}


@pytest.mark.parametrize(
    "declared",
    [
        {"conflicts": [Conflict("b", "why", when={"dep": True})]},
        {"conflicts": [Conflict("train.precison", "why", values=("fp32",))]},
        {"conflicts": [Conflict("parallel.dp", "why")]},
        {"needs": [Need("b", "why", when={"dep": True})]},
    ],
)
def test_a_declaration_about_a_key_that_does_not_exist_is_a_bug_of_the_plugin(declared):
    (line,) = said([declare("a", **declared)], {})

    assert line.startswith("parallel.passes.a: it declares ")
    assert line.endswith("This is a bug in acme.")


@pytest.mark.parametrize(
    ("other", "declared"),
    [
        ("Not A Name", {}),
        ("fsdp", {"values": ("fp32",)}),
        ("train.precision", {}),
        ("parallel.tp", {"values": (2,)}),
        ("parallel.tp", {"other_when": {"mode": "odd"}}),
    ],
)
def test_a_conflict_that_means_nothing_cannot_be_declared(other, declared):
    with pytest.raises(ValueError, match=r"other|values"):
        Conflict(other, "why", **declared)


def test_a_pass_named_twice_is_refused():
    passes = catalog(declare("a", aliases=["b"]))

    with pytest.raises(ConfigError, match="'acme:a' is named 2 times"):
        sort_passes(job({"a": use("a"), "b": use("a")}), passes)


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, [1, 1, 1, 1, 1]),
        ({}, 8, [1, 1, 8, 1, 1]),
        ({"tp": 2, "pp": 2}, 8, [2, 1, 2, 1, 2]),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, 8, [1, 2, 2, 2, 1]),
        ({"ep": 4, "tp": 2}, 8, [1, 1, 4, 1, 2]),
    ],
)
def test_degrees_fill_the_world(degrees, world_size, expected):
    resolved = resolve_degrees(ParallelSection(**degrees), world_size)

    assert list(resolved) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert list(resolved.values()) == expected


@pytest.mark.parametrize(
    ("degrees", "world_size", "sentence"),
    [
        ({"tp": 4}, 6, "6 ranks cannot be divided by the degrees, which ask for a multiple of 4 (tp 4)"),
        ({"tp": 2}, 1, "1 ranks cannot be divided"),
        ({"dp_shard": 2, "tp": 2}, 8, "the degrees ask for 4 ranks (dp_shard 2 × tp 2), and there are 8; start 4"),
        ({"dp_shard": 1}, 2, "the degrees ask for 1 ranks (all axes 1), and there are 2"),
        ({"ep": 3}, 4, "parallel.ep = 3 must divide the 4 ranks that it borrows (dp_shard 4 × cp 1)"),
    ],
)
def test_degrees_that_do_not_fit_are_explained(degrees, world_size, sentence):
    with pytest.raises(ConfigError) as raised:
        resolve_degrees(ParallelSection(**degrees), world_size)

    assert sentence in str(raised.value)


def test_what_a_job_requires_is_told_with_the_setting_that_asks_for_it():
    asked = job({}, precision="bf16", tp=2, ep=2)

    assert required_capabilities(asked, 8) == {
        "dp_shard": "parallel.dp_shard = -1 (4 of 8 ranks)",
        "tp": "parallel.tp = 2",
        "ep": "parallel.ep = 2",
        "precision": 'train.precision = "bf16"',
    }
    assert list(required_capabilities(asked, None)) == ["tp", "ep", "precision"]
    assert required_capabilities(job({}), 1) == {}


FSDP = declare("fsdp", "fsdp", serves=["dp_shard", "dp_replicate", "precision"])
TP = declare("tp", serves=["tp"])


def complete(asked: Job, installed: Catalog, world_size: int | None = None) -> dict[str, ComponentRef | None]:
    def resolve(kind, name):
        provided = installed.lookup(kind, name)
        return use(provided.component.name, provided.plugin.distribution)

    done, problems = add_required(asked, installed, world_size, resolve)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return dict(done.parallel.passes)


def incomplete(asked: Job, installed: Catalog, world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        complete(asked, installed, world_size)
    return str(raised.value)


def test_the_one_installed_pass_that_serves_is_added():
    asked = job({}, precision="bf16", tp=2)

    added = complete(asked, catalog(FSDP, TP, declare("compile", "compile")), 4)

    assert added == {"fsdp": use("fsdp"), "tp": use("tp")}


def test_nothing_is_added_where_nothing_is_required_or_a_named_pass_serves():
    assert complete(job({}), catalog(FSDP), 1) == {}
    own = declare("my_fsdp", "fsdp", serves=["precision"])
    asked = job({"my_fsdp": use("my_fsdp")}, precision="bf16")
    assert complete(asked, catalog(FSDP, own)) == {"my_fsdp": use("my_fsdp")}


def test_a_pass_added_for_one_need_settles_another_that_had_a_choice():
    both = declare("both", serves=["tp", "cp"])
    other = declare("other", serves=["cp"])

    assert set(complete(job({}, tp=2, cp=2), catalog(both, other))) == {"both"}


def test_an_added_pass_does_not_take_the_place_of_a_named_one():
    named = {"tp": use("tp", "beta")}
    installed = catalog(TP, beta=[declare("tp")])

    assert complete(job(named, tp=2), installed) == named | {"acme:tp": use("tp")}


def test_a_need_that_no_installed_pass_serves_says_what_to_install():
    assert incomplete(job({}, tp=2), catalog(FSDP)) == (
        "parallel.tp = 2: no installed pass serves the axis 'tp'; 'tensor_parallel' is in forge-plugins-parallel, "
        "which is not installed: pip install forge-plugins-parallel"
    )


def test_several_passes_that_would_serve_need_a_line_to_paste():
    assert incomplete(job({}, tp=2), catalog(TP, beta=[TP])) == (
        "parallel.tp = 2: 2 installed passes could serve it. Say which one, under [parallel.passes]:\n"
        '    "acme:tp" = true    # tp it\n'
        '    "beta:tp" = true    # tp it'
    )


def test_switching_one_of_two_off_decides():
    assert complete(job({"beta:tp": None}, tp=2), catalog(TP, beta=[TP]))["tp"] == use("tp")


def test_switching_off_what_is_needed_is_a_contradiction():
    assert incomplete(job({"fsdp": None}, precision="bf16"), catalog(FSDP)) == (
        'train.precision = "bf16": parallel.passes.fsdp = false switches off every installed pass that computes in it; '
        "remove one or the other"
    )


def test_switching_off_a_pass_that_does_not_exist_is_a_typo():
    assert incomplete(job({"fdsp": None}), catalog(FSDP)).startswith(
        "parallel.passes.fdsp: no installed plugin provides a parallel pass named 'fdsp'. Did you mean 'fsdp'?"
    )


def test_all_needs_are_reported_at_once():
    assert len(incomplete(job({}, tp=2, pp=2), catalog(FSDP)).splitlines()) == 2


def test_what_an_added_pass_needs_is_added_too_unless_it_is_switched_off():
    cp = declare("cp", serves=["cp"], needs=["fsdp"])

    assert complete(job({}, cp=2), catalog(cp, FSDP)) == {"cp": use("cp"), "fsdp": use("fsdp")}
    assert complete(job({"fsdp": None}, cp=2), catalog(cp, FSDP)) == {"fsdp": None, "cp": use("cp")}


def test_the_rest_of_the_job_is_left_as_it_was():
    asked = job({}, precision="bf16")

    done, problems = add_required(asked, catalog(FSDP), None, lambda kind, name: use("fsdp"))

    assert problems == []
    assert attrs.evolve(done, parallel=asked.parallel) == asked
    assert asked.parallel.passes == {}


def test_pure_bf16_asks_for_no_pass_and_mixed_precision_for_one():
    assert required_capabilities(job({}, precision="bf16_pure"), world_size=1) == {}
    assert [*required_capabilities(job({}, precision="bf16"), world_size=1)] == ["precision"]
