"""``grouped``: each parameter has exactly one optimizer, which does what it would do alone."""

import copy

import pytest
import torch
from torch import nn

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError, ForgeError
from forge_core.train.parameter_groups import split_groups
from forge_plugins_optim.grouped import Grouped
from forge_testing.component_case import builder

ROLES = {
    "embed.weight": "embedding",
    "blocks.0.norm.weight": "norm",
    "blocks.0.attention.q.weight": "matrix",
    "blocks.0.feed_forward.up.weight": "matrix",
    "head.weight": "head",
}
MUON, ADAMW = {"name": "muon", "lr": 0.02}, {"name": "adamw", "lr": 0.01}
BY_ROLE = [
    {"roles": ["matrix", "expert"], "optimizer": MUON},
    {"roles": ["embedding", "head", "norm", "bias"], "optimizer": ADAMW},
]


def drawn(elsewhere=frozenset()) -> list[NamedParameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: (4,) if role == "norm" else (6, 4) for name, role in ROLES.items()}
    return [
        NamedParameter(name, nn.Parameter(torch.randn(shapes[name], generator=generator)), role, elsewhere)
        for name, role in ROLES.items()
    ]


def make(groups, parameters):
    use = builder().resolve("optimizer", {"name": "grouped", "groups": groups})
    return builder()(use, parameters=parameters)


def step(optimizer, parameters, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in parameters:
        one.parameter.grad = torch.randn(one.parameter.shape, generator=generator)
    optimizer.step()


def test_each_optimizer_does_what_it_does_alone() -> None:
    together, apart = drawn(), drawn()
    optimizer = make(BY_ROLE, together)
    alone = [
        builder()(
            builder().resolve("optimizer", group["optimizer"]),
            parameters=[one for one in apart if one.role in group["roles"]],
        )
        for group in BY_ROLE
    ]

    for seed in range(5):
        step(optimizer, together, seed)
        step(alone[0], apart, seed)
        alone[1].step()

    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.parameter, other.parameter), one.name


def test_each_optimizer_scales_its_gradients_if_all_can() -> None:
    groups = [{**group, "optimizer": ADAMW} for group in BY_ROLE]
    scaled, by_hand = drawn(), drawn()
    optimizer, other = make(groups, scaled), make(groups, by_hand)
    assert optimizer.scales_gradients

    for seed, factor in enumerate((1.0, 0.1)):
        optimizer.gradient_scale = torch.tensor(factor)
        step(optimizer, scaled, seed)
        generator = torch.Generator().manual_seed(seed)
        for one in by_hand:
            one.parameter.grad = torch.randn(one.parameter.shape, generator=generator) * factor
        other.step()

    for one, same in zip(scaled, by_hand, strict=True):
        torch.testing.assert_close(one.parameter, same.parameter, rtol=1e-6, atol=1e-7)
    assert not make(BY_ROLE, drawn()).scales_gradients, "muon does not"


def test_a_step_that_is_left_out_changes_nothing_if_all_can_leave_it_out() -> None:
    parameters = drawn()
    optimizer = make(BY_ROLE, parameters)
    assert optimizer.leaves_out
    before = [one.parameter.detach().clone() for one in parameters]

    optimizer.left_out = torch.ones(())
    step(optimizer, parameters)

    assert all(one.parameter.equal(old) for one, old in zip(parameters, before, strict=True))

    def build(use, *, parameters):  # torch's SGD makes its momentum all the same
        make = torch.optim.SGD if use.name == "muon" else torch.optim.AdamW
        return make([one.parameter for one in parameters], lr=0.1, fused=True)

    config = builder().resolve("optimizer", {"name": "grouped", "groups": BY_ROLE}).config
    assert not Grouped(config, parameters=drawn(), build=build).leaves_out


def test_what_is_evaluated_is_that_of_all_that_have_averages() -> None:
    groups = [{**group, "optimizer": {"name": "schedule_free_adamw", "lr": 0.01}} for group in BY_ROLE]

    assert make(groups, drawn()).evaluation_weights().keys() == ROLES.keys()
    assert make([groups[0], BY_ROLE[1]], drawn()).evaluation_weights().keys() == {
        name for name, role in ROLES.items() if role == "matrix"
    }


def test_a_learning_rate_set_on_a_group_of_the_whole_reaches_its_optimizer() -> None:
    parameters = drawn()
    optimizer = make(BY_ROLE, parameters)
    before = {one.name: one.parameter.detach().clone() for one in parameters}
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.01, 0.02]

    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(optimizer, parameters)

    assert all(torch.equal(one.parameter, before[one.name]) for one in parameters)


def test_a_learning_rate_reaches_groups_within_groups_that_phases_have_split() -> None:
    """The inner ones kept the groups from before the split, whose rate never changed."""
    parameters = drawn()
    optimizer = make(
        [{"roles": ["matrix"], "optimizer": {"name": "grouped", "groups": BY_ROLE[:1]}}, *BY_ROLE[1:]], parameters
    )
    split_groups(optimizer, id)
    before = [one.parameter.detach().clone() for one in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0

    step(optimizer, parameters)

    assert all(one.parameter.equal(old) for one, old in zip(parameters, before, strict=True))


def test_patterns_and_roles_hold_together_and_one_group_takes_the_rest() -> None:
    parameters = drawn()
    groups = [
        {"optimizer": ADAMW},
        {"roles": ["matrix"], "patterns": ["*.attention.*"], "optimizer": MUON},
        {"patterns": ["*.norm.*", "head.*"], "optimizer": {"name": "lion", "lr": 0.003}},
    ]

    optimizer = make(groups, parameters)

    names = {one.parameter: one.name for one in parameters}
    rates = {names[parameter]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert rates == {
        "embed.weight": 0.01,
        "blocks.0.feed_forward.up.weight": 0.01,
        "blocks.0.attention.q.weight": 0.02,
        "blocks.0.norm.weight": 0.003,
        "head.weight": 0.003,
    }


def test_parameters_in_no_group_are_listed() -> None:
    with pytest.raises(
        ConfigError, match=r"in no group: embed\.weight \(embedding\), .*norm.*, head\.weight \(head\)\. Name"
    ):
        make(BY_ROLE[:1], drawn())


def test_a_parameter_in_two_groups_is_named() -> None:
    groups = [*BY_ROLE, {"patterns": ["*.q.weight"], "optimizer": ADAMW}]

    with pytest.raises(ConfigError, match=r"blocks\.0\.attention\.q\.weight \(matrix\) is in the groups 0 and 2"):
        make(groups, drawn())


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"roles": ["expert"], "optimizer": MUON}, r"group 2 \(roles \['expert'\]\) takes no parameter"),
        ({"patterns": ["block.*"], "optimizer": MUON}, r"group 2 \(patterns \['block\.\*'\]\) takes no parameter"),
        ({"optimizer": MUON}, r"group 2 \(the rest\) takes no parameter"),
    ],
)
def test_a_group_without_parameters_is_an_error_where_the_model_is_whole(group, words) -> None:
    with pytest.raises(ConfigError, match=words):
        make([*BY_ROLE, group], drawn())

    assert make([*BY_ROLE, group], drawn(frozenset(["block.9.q.weight"]))), "another pipeline stage may have them"


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"roles": ["matrx"], "optimizer": MUON}], "did you mean 'matrix'"),
        ([{"roles": ["matrix"], "optimizer": {"name": "moun", "lr": 1.0}}], "muon"),
        ([{"optimizer": MUON}, {"optimizer": ADAMW}], "one alone can take the rest"),
        ([], "groups"),
    ],
)
def test_wrong_keys_are_sentences(groups, words) -> None:
    with pytest.raises(ForgeError, match=words):
        make(groups, drawn())


def test_muon_on_other_roles_is_found_at_validation() -> None:
    groups = [*BY_ROLE, {"roles": ["expert", "head"], "optimizer": MUON}, {"patterns": ["head.*"], "optimizer": MUON}]
    groups.append({"roles": ["matrix", "bias"], "patterns": ["blocks.*"], "optimizer": MUON})
    config = builder().resolve("optimizer", {"name": "grouped", "groups": groups}).config

    found = [*config.check(job=None)]

    assert found == [("groups[2].roles", "muon takes matrix and expert; got 'head'")]


def test_muon_on_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"muon was given embed\.weight \(embedding \(6, 4\)\)"):
        make([{"optimizer": MUON}], drawn())


def test_muon_on_kernels_of_convolutions_is_refused_with_what_keeps_them_out() -> None:
    kernel = NamedParameter("stem.weight", nn.Parameter(torch.zeros(4, 3, 2, 2)), "matrix")

    with pytest.raises(ConfigError, match=r"stem\.weight \(matrix \(4, 3, 2, 2\)\)\. .*with patterns for muon"):
        make(BY_ROLE, [*drawn(), kernel])
    make([{**BY_ROLE[0], "patterns": ["blocks.*"]}, {"optimizer": ADAMW}], [*drawn(), kernel])


def test_state_of_another_optimizer_is_refused() -> None:
    """A momentum of Muon and one of Lion have the same name and shape."""
    saved, resumed = drawn(), drawn()
    before, after = make([{"optimizer": {"name": "lion", "lr": 0.1}}], saved), make(BY_ROLE, resumed)
    step(before, saved)
    for old, new in zip(saved, resumed, strict=True):
        after.state[new.parameter].update(before.state[old.parameter])

    with pytest.raises(ConfigError, match=r"blocks\.0\..* was updated by forge-plugins-optim:lion when"):
        step(after, resumed)


def test_groups_within_groups_go_on_with_their_state() -> None:
    """The outer one missed its own name in the state, which has that of the innermost."""
    nested = [{"roles": ["matrix"], "optimizer": {"name": "grouped", "groups": BY_ROLE[:1]}}, *BY_ROLE[1:]]
    saved, resumed = drawn(), drawn()
    before, after = make(nested, saved), make(nested, resumed)
    step(before, saved)
    for old, new in zip(saved, resumed, strict=True):
        new.parameter.data.copy_(old.parameter)
        after.state[new.parameter].update(copy.deepcopy(before.state[old.parameter]))

    step(before, saved, seed=2)
    step(after, resumed, seed=2)

    assert all(old.parameter.equal(new.parameter) for old, new in zip(saved, resumed, strict=True))
