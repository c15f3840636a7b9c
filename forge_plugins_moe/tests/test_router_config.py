"""What is refused before anything is built."""

import attrs
import pytest

from forge_core.config.field_docs import field_docs
from forge_core.job import ConfigProblems
from forge_plugins_moe.router_config import ExpertChoiceConfig
from forge_testing.component_case import builder
from forge_testing.small_model import small_job

BAD = [
    ("softmax_topk", {"top_k": 0}, "top_k"),
    ("softmax_topk", {"top_k": 1}, 'set order = "softmax_topk"'),
    ("softmax_topk", {"normalize": True}, "the weights of a token sum to 1 as it is"),
    ("softmax_topk", {"top_k": 1, "order": "softmax_topk", "normalize": True}, "the gate would learn nothing"),
    ("softmax_topk", {"order": "softmax_topks"}, "did you mean 'softmax_topk'"),
    ("softmax_topk", {"balance": -1.0}, "balance"),
    ("softmax_topk", {"balance": 0.0, "balance_scope": "sequence"}, "has no effect with balance = 0"),
    ("softmax_topk", {"balance_counts": "routed"}, "neither a selection bias nor groups"),
    ("softmax_topk", {"bias_center": True}, "has no effect without a bias_rate above 0"),
    ("softmax_topk", {"bias_rate": 0.0, "bias_schedule": "cosine_decay"}, "without a bias_rate above 0"),
    ("softmax_topk", {"bias_rates": 0.1}, "bias_rate"),
    ("sigmoid_topk", {"top_k": 1}, "set normalize = false"),
    ("sigmoid_topk", {"groups_per_token": 2}, "has no effect without n_groups"),
    ("sigmoid_topk", {"n_groups": 4}, "must say to how many of the n_groups = 4 groups"),
    ("sigmoid_topk", {"n_groups": 4, "groups_per_token": 5}, "must not be above n_groups = 4, got 5"),
    ("sigmoid_topk", {"n_groups": 4, "groups_per_token": 4}, "has no effect: a token may go to all 4 groups"),
    ("sigmoid_topk", {"group_score": "max"}, "has no effect without n_groups"),
    ("sigmoid_topk", {"bias_warmup": 0.2}, 'has no effect without bias_schedule = "linear_warmup"'),
    ("sigmoid_topk", {"bias_frozen_from": 1.5}, "bias_frozen_from"),
    ("sigmoid_topk", {"score_function": "softmax"}, "score_function"),
    ("sigmoid_topk", {"route_scale": 0.0}, "route_scale"),
    ("noisy_topk", {"top_k": 1}, "must be at least 2, got 1"),
    ("sinkhorn", {"iterations": 0}, "iterations"),
    ("sinkhorn", {"iterations": 10**9}, "iterations: must be at most 1000, got 1000000000"),
    ("expert_choice", {"experts_per_token": 0.0}, "experts_per_token"),
    ("hash", {"route_scale": 2.0}, 'has no effect without weights = "gate"'),
    ("hash", {"weights": "gate"}, "the gate would learn nothing"),
    ("hash", {"file": "x.npy", "table": "random"}, "has no effect beside file"),
]


@pytest.mark.parametrize(("name", "keys", "sentence"), BAD)
def test_bad_settings_are_refused_with_a_sentence(name, keys, sentence):
    with pytest.raises(ConfigProblems) as raised:
        builder().resolve("router", {"name": f"forge-plugins-moe:{name}", **keys})

    assert sentence in str(raised.value)


GOOD = [
    ("softmax_topk", {"n_groups": 4, "groups_per_token": 2, "balance_counts": "routed"}),
    ("softmax_topk", {"top_k": 1, "order": "softmax_topk", "bias_rate": 0.0, "balance_counts": "routed"}),
    ("sigmoid_topk", {"bias_schedule": "linear_warmup", "bias_warmup": 0.2, "bias_frozen_from": 0.9}),
    ("sigmoid_topk", {"bias_rate": 0.0, "balance": 0.0001}),
    ("hash", {"top_k": 2, "weights": "gate", "route_scale": 2.0, "score_function": "softmax"}),
]


@pytest.mark.parametrize(("name", "keys"), GOOD)
def test_good_settings_are_taken(name, keys):
    builder().resolve("router", {"name": f"forge-plugins-moe:{name}", **keys})


@pytest.mark.parametrize(
    ("cp", "scope", "refused"), [(2, "sequence", True), (2, "batch", False), (1, "sequence", False)]
)
def test_experts_cannot_compare_tokens_on_different_ranks(cp, scope, refused):
    job = small_job()
    job = attrs.evolve(job, parallel=attrs.evolve(job.parallel, cp=cp))

    problems = [*ExpertChoiceConfig(scope=scope).check(job)]

    assert [key for key, _ in problems] == (["scope"] if refused else [])


def test_keys_and_defaults_are_documented():
    for name, cls in attrs_classes():
        documented = field_docs(cls)
        missing = [field.name for field in attrs.fields(cls) if field.name not in documented]
        assert not missing, f"{name}: {missing}"


def attrs_classes():
    """The config classes of all routers of this package."""
    for name in ("softmax_topk", "sigmoid_topk", "expert_choice", "hash", "sinkhorn", "noisy_topk", "uniform"):
        yield name, type(builder().resolve("router", f"forge-plugins-moe:{name}").config)
