import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_core.contracts.optimizer import NamedParameter
from forge_core.errors import ConfigError
from forge_plugins_optim.config import ParameterGroup, ParameterRules
from forge_plugins_optim.parameter_groups import parameter_groups

ROLES = {
    "embed.weight": "embedding",
    "blocks.0.norm.weight": "norm",
    "blocks.0.attention.q.weight": "matrix",
    "blocks.0.attention.q.bias": "bias",
    "blocks.0.feed_forward.experts.up": "expert",
    "blocks.1.attention.q.weight": "matrix",
    "head.weight": "head",
}


@pytest.fixture
def parameters() -> list[NamedParameter]:
    return [NamedParameter(name, nn.Parameter(torch.ones(2)), role) for name, role in ROLES.items()]


def settings(parameters, groups=(), decay_embeddings=False) -> dict[str, tuple[float, float]]:
    """(lr, weight decay) by name."""
    made = parameter_groups(parameters, ParameterRules(lr=1.0, decay_embeddings=decay_embeddings, groups=groups))
    names = {id(entry.parameter): entry.name for entry in parameters}
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in made for p in group["params"]}


def test_only_matrices_experts_and_the_head_decay(parameters) -> None:
    decayed = {name for name, (_, decay) in settings(parameters).items() if decay}

    assert decayed == {name for name, role in ROLES.items() if role in ("matrix", "expert", "head")}


def test_embeddings_decay_when_asked(parameters) -> None:
    assert settings(parameters, decay_embeddings=True)["embed.weight"] == (1.0, 0.1)


def test_a_role_without_a_rule_is_refused_unless_a_group_decides(parameters) -> None:
    filters = NamedParameter("conv.filters", nn.Parameter(torch.ones(2)), "filter")

    with pytest.raises(ConfigError, match=r"conv.filters has the role 'filter', for which there is no rule; known are"):
        settings([*parameters, filters])
    group = ParameterGroup(pattern="conv.*", weight_decay=0.3)
    assert settings([*parameters, filters], [group])["conv.filters"] == (1.0, 0.3)
    made = parameter_groups([*parameters, filters], ParameterRules(lr=1.0, weight_decay=0.0))
    assert filters.parameter in {one for group in made for one in group["params"]}


def test_every_parameter_is_in_one_group(parameters) -> None:
    made = parameter_groups(parameters, ParameterRules(lr=1.0))

    assert sorted(id(p) for group in made for p in group["params"]) == sorted(id(p.parameter) for p in parameters)


def test_the_first_match_wins(parameters) -> None:
    groups = (
        ParameterGroup(pattern="blocks.0.attention.*", lr=5.0),
        ParameterGroup(pattern="blocks.*", lr_scale=0.5, weight_decay=0.3),
    )

    found = settings(parameters, groups)

    assert found["blocks.0.attention.q.weight"] == (5.0, 0.1)
    assert found["blocks.0.attention.q.bias"] == (5.0, 0.0)
    assert found["blocks.1.attention.q.weight"] == (0.5, 0.3)
    assert found["blocks.0.norm.weight"] == (0.5, 0.3), "weight_decay of a group holds for norms too"
    assert found["head.weight"] == (1.0, 0.1)


def test_a_group_may_have_the_learning_rate_or_the_decay_zero(parameters) -> None:
    assert settings(parameters, (ParameterGroup(pattern="head.*", lr=0.0),))["head.weight"] == (0.0, 0.1)
    assert settings(parameters, (ParameterGroup(pattern="head.*", weight_decay=0.0),))["head.weight"] == (1.0, 0.0)


def test_a_pattern_without_a_match_names_the_nearest(parameters) -> None:
    with pytest.raises(ConfigError) as error:
        settings(parameters, (ParameterGroup(pattern="blocks.*.atention.q.weight", lr=1.0),))

    assert "'blocks.*.atention.q.weight' matches no parameter" in str(error.value)
    assert "blocks.0.attention.q.weight" in str(error.value)


def test_a_pattern_may_be_for_another_pipeline_stage(parameters) -> None:
    there = frozenset({"blocks.7.attention.q.weight"})
    parameters = [NamedParameter(one.name, one.parameter, one.role, there) for one in parameters]

    assert settings(parameters, (ParameterGroup(pattern="blocks.7.*", lr=5.0),))["head.weight"] == (1.0, 0.1)
    with pytest.raises(ConfigError, match=r"'blocks\.8\.\*' matches no parameter"):
        settings(parameters, (ParameterGroup(pattern="blocks.8.*", lr=5.0),))


def test_a_pattern_that_comes_too_late_is_an_error(parameters) -> None:
    groups = (ParameterGroup(pattern="*"), ParameterGroup(pattern="head.*", lr_scale=0.1))

    with pytest.raises(ConfigError, match=r"'head\.\*' takes no parameter, because groups before it"):
        settings(parameters, groups)


def test_a_group_with_a_pattern_only_keeps_what_it_takes_from_later_groups(parameters) -> None:
    groups = (ParameterGroup(pattern="*.bias"), ParameterGroup(pattern="blocks.*", lr=5.0))

    found = settings(parameters, groups)

    assert found["blocks.0.attention.q.bias"] == (1.0, 0.0)
    assert found["blocks.0.attention.q.weight"] == (5.0, 0.1)


def test_a_group_that_changes_nothing_is_an_error(parameters) -> None:
    with pytest.raises(ConfigError, match=r"the group with the pattern '\*\.bias' has no effect"):
        settings(parameters, (ParameterGroup(pattern="*.bias"), ParameterGroup(pattern="head.*", lr=5.0)))


@pytest.mark.usefixtures("one_rank")
def test_parameters_of_different_meshes_are_apart_and_can_be_stepped() -> None:
    meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("dp_shard", "ep")]
    tensors = [torch.ones(4), *(distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for mesh in meshes)]
    parameters = [NamedParameter(str(i), nn.Parameter(t), "matrix") for i, t in enumerate(tensors)]

    groups = parameter_groups(parameters, ParameterRules(lr=1.0))

    optimizer = torch.optim.AdamW(groups, fused=True)
    for entry in parameters:
        entry.parameter.grad = entry.parameter.detach().clone()
    optimizer.step()
    assert len(groups) == 3
    values = [p.detach().to_local() if isinstance(p, DTensor) else p.detach() for g in groups for p in g["params"]]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
