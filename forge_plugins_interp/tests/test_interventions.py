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
    ],
)
def test_a_table_that_is_no_change_is_a_sentence(table, message):
    with pytest.raises(ConfigError, match=message):
        from_table(table)


def test_a_function_cannot_be_written():
    with pytest.raises(ConfigError, match="cannot be written: it holds a function"):
        to_table(Fn("z", function=torch.neg))
