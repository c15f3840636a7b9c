"""Changes of a value: what each does, where, and as text."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_interp.interventions import (
    Add,
    Fn,
    Intervention,
    Mean,
    Patch,
    Project,
    Replace,
    Resample,
    Scale,
    Zero,
    from_table,
    to_table,
)
from forge_plugins_interp.sites import PlacedSite

SITE = Site(module="", dims=("sample", "position", "width"))
STREAM = PlacedSite("blocks.0.resid_post", SITE, nn.Identity(), [], [], is_compiled=False)
VALUE = torch.arange(24.0).view(2, 3, 4)
AXES = torch.eye(4)[:2]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Zero("*"), torch.zeros(2, 3, 4)),
        (Scale("*", factor=2.0), 2 * VALUE),
        (Replace("*", value=torch.ones(4)), torch.ones(2, 3, 4)),
        (Add("*", value=torch.ones(4), scale=3.0), VALUE + 3),
        (Mean("*"), VALUE.mean((0, 1)).expand(2, 3, 4)),
        (Mean("*", value=torch.full((4,), 7.0)), torch.full((2, 3, 4), 7.0)),
        (Resample("*", seed=1), VALUE.flip(0)),
        (Project("*", directions=AXES), VALUE * torch.tensor([0.0, 0, 1, 1])),
        (Project("*", directions=AXES, keep=True), VALUE * torch.tensor([1.0, 1, 0, 0])),
        (Patch("*", source={STREAM.name: -VALUE}), -VALUE),
        (Fn("*", function=torch.square), VALUE.square()),
    ],
    ids=lambda one: one.kind if isinstance(one, Intervention) else "",
)
def test_a_change_of_all(change, expected):
    assert torch.allclose(change.apply(STREAM, VALUE), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("at", "where"),
    [
        ({"position": -1}, (slice(None), 2)),
        ({"sample": 1, "width": [0, 3]}, (1, slice(None), [0, 3])),
        ({"sample": [0], "position": [0, 2], "width": [1]}, (0, [0, 2], 1)),
    ],
)
def test_what_at_does_not_name_stays(at, where):
    expected = VALUE.clone()
    expected[where] *= -1

    assert torch.equal(Scale("*", factor=-1.0, at=at).apply(STREAM, VALUE), expected)
    assert torch.equal(Patch("*", source={STREAM.name: -VALUE}, at=at).apply(STREAM, VALUE), expected)


@pytest.mark.parametrize(
    ("dims", "averaged"),
    [
        (("sample", "head", "position", "head_width"), (0, 2)),
        (("sample", "kv_head", "key", "head_width"), (0, 2)),
        (("sample", "head", "position", "key"), (0, 2)),
        (("sample", "position", "head", "width"), (0, 1)),
        (("tile", "patch", "head", "width"), (0, 1)),
    ],
)
def test_a_mean_is_over_samples_and_positions_wherever_a_site_has_them(dims, averaged):
    value = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    placed = PlacedSite("blocks.0.z", Site(module="", dims=dims), nn.Identity(), [], [], is_compiled=False)
    expected = value.mean(averaged, keepdim=True).expand_as(value)

    assert torch.allclose(Mean("*").apply(placed, value), expected)
    some = Mean("*", at={dims[3]: 0}).apply(placed, value)
    assert torch.allclose(some[..., 0], expected[..., 0])
    assert torch.equal(some[..., 1:], value[..., 1:])


@pytest.mark.parametrize("n_samples", [2, 3, 4, 5])
def test_each_sample_gets_the_values_of_another_one(n_samples):
    own = torch.arange(float(n_samples)).view(-1, 1, 1).expand(-1, 3, 4)

    drawn = [Resample("*", seed=seed).apply(STREAM, own)[:, 0, 0].tolist() for seed in range(20)]

    assert all(sorted(each) == list(range(n_samples)) for each in drawn)
    assert not any(new == old for each in drawn for old, new in enumerate(each))
    assert n_samples == 2 or len({*map(tuple, drawn)}) > 1, "the seed decides which"


def test_the_projection_on_directions_that_depend_on_each_other_is_that_on_one_of_them():
    one = torch.tensor([[1.0, 2, 0, 0]])
    dependent = torch.cat((one, -3 * one, torch.zeros(1, 4)))

    for keep in (False, True):
        expected = Project("*", directions=one, keep=keep).apply(STREAM, VALUE)
        assert torch.allclose(Project("*", directions=dependent, keep=keep).apply(STREAM, VALUE), expected, atol=1e-5)
    assert torch.equal(Project("*", directions=torch.zeros(1, 4)).apply(STREAM, VALUE), VALUE)


def test_the_projection_of_doubles_is_as_exact_as_they_are():
    left = Project("*", directions=torch.ones(1, 4)).apply(STREAM, VALUE.double() / 3)

    assert left.sum(-1).abs().max() < 1e-13


def test_the_projection_on_directions_that_are_not_orthogonal():
    directions = torch.tensor([[1.0, 1, 0, 0], [1.0, 0, 0, 0]])

    left = Project("*", directions=directions).apply(STREAM, VALUE)[..., :2]
    assert torch.allclose(left, torch.zeros(()), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            Zero("*", at={"postion": 0}),
            "at.postion: site blocks.0.resid_post has the dimensions sample, position",
        ),
        (Zero("*", at={"position": 3}), "at.position: 3 lies beyond the 3 of site blocks.0.resid_post"),
        (Replace("*", value=torch.ones(5)), r"a value of the shape \(5,\) cannot be put in the place of \(2, 3, 4\)"),
        (Project("*", directions=torch.ones(2, 5)), r"blocks.0.resid_post has 4 features, and these are \(2, 5\)"),
        (Resample("*", at={"sample": 0}), "resample: site blocks.0.resid_post has one sample, and no other one"),
        (Patch("*", source={}), "site blocks.0.resid_post was not observed"),
        (Patch("*", source={STREAM.name: VALUE[:1]}), r"observed with the shape \(1, 3, 4\), and has \(2, 3, 4\) here"),
    ],
)
def test_a_change_that_does_not_fit_is_a_sentence(change, message):
    with pytest.raises(ConfigError, match=message):
        change.apply(STREAM, VALUE)


@pytest.mark.parametrize(
    "change",
    [
        Zero("blocks.*.z", at={"head": [0, 2]}),
        Mean("logits"),
        Scale("embed", factor=2.0, tokens=[3, 5], steps=[0]),
        Resample("embed", seed=4),
        Add("embed", value=torch.tensor([0.5, -2.0]), scale=0.25, at={"position": -1}),
        Project("embed", directions=AXES, keep=True),
        Patch("embed", source={"embed": torch.ones(1, 2)}),
    ],
    ids=lambda one: one.kind,
)
def test_a_change_survives_json(change):
    again = from_table(json.loads(json.dumps(to_table(change))))

    assert type(again) is type(change)
    assert to_table(again) == to_table(change)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"change": "zeros", "site": "z"}, "change: must be one of zero, mean, .* got 'zeros'; did you mean 'zero'"),
        ({"change": "scale", "site": "z"}, "factor: the change 'scale' needs it"),
        ({"change": "zero", "site": "z", "att": {}}, "att: no key of the change 'zero'; did you mean 'at'"),
        (
            {"change": "zero", "site": "z", "tokens": [1, -2]},
            r"tokens: must be a list of whole numbers .* got \[1, -2\]",
        ),
        ({"change": "zero", "site": "z", "steps": 3}, "steps: must be a list of whole numbers from 0, got 3"),
        ({"change": "add", "site": "z", "value": "x"}, "value: must be a number or lists of numbers"),
        ({"change": "zero", "site": 5}, "site: must be a name or a pattern, got 5"),
        ({"change": "zero", "site": "z", "at": 3}, "at: must be a table of whole numbers and lists of them, got 3"),
        ({"change": "zero", "site": "z", "at": {"head": ["x"]}}, "at: must be a table of whole numbers"),
        ({"change": "scale", "site": "z", "factor": "2"}, "factor: must be a number, got '2'"),
        ({"change": "add", "site": "z", "value": 1, "scale": True}, "scale: must be a number, got True"),
        ({"change": "resample", "site": "z", "seed": 1.5}, "seed: must be a whole number, got 1.5"),
        ({"change": "project", "site": "z", "directions": [[1]], "keep": "no"}, "keep: must be true or false"),
        ({"change": "patch", "site": "z", "source": 3}, "source: must be a table of values by site, got 3"),
    ],
)
def test_a_table_that_is_no_change_is_a_sentence(table, message):
    with pytest.raises(ConfigError, match=message):
        from_table(table)


def test_a_function_cannot_be_written():
    with pytest.raises(ConfigError, match="cannot be written: it holds a function"):
        to_table(Fn("z", function=torch.neg))
