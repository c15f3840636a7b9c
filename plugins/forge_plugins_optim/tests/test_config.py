"""Ranges, and what is said about the rest of the job; no torch is needed for either."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from forge_core.config.sections import TrainSection
from forge_plugins_optim.config import (
    AdamWConfig,
    ChunkedCrossEntropyConfig,
    ConstantConfig,
    CosineConfig,
    LionConfig,
    MuonConfig,
    ParameterGroup,
    SGDConfig,
)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (AdamWConfig, {"lr": 0.0}),
        (AdamWConfig, {"lr": -1.0}),
        (AdamWConfig, {"lr": 0.1, "betas": (0.9, 1.0)}),
        (AdamWConfig, {"lr": 0.1, "betas": (-0.1, 0.9)}),
        (AdamWConfig, {"lr": 0.1, "eps": 0.0}),
        (AdamWConfig, {"lr": 0.1, "weight_decay": -0.1}),
        (LionConfig, {"lr": 0.1, "betas": (0.9, 1.0)}),
        (MuonConfig, {"lr": 0.1, "iterations": 0}),
        (MuonConfig, {"lr": 0.1, "momentum": 1.0}),
        (SGDConfig, {"lr": 0.1, "momentum": 1.0}),
        (SGDConfig, {"lr": 0.1, "nesterov": True, "momentum": 0.0}),
        (ParameterGroup, {"pattern": ""}),
        (ParameterGroup, {"pattern": "*", "lr": -1.0}),
        (ParameterGroup, {"pattern": "*", "lr": 1.0, "lr_scale": 1.0}),
        (ConstantConfig, {"warmup_steps": -1}),
        (CosineConfig, {"min_ratio": 1.5}),
        (CosineConfig, {"min_ratio": -0.1}),
        (CosineConfig, {"decay_steps": 0}),
        (ChunkedCrossEntropyConfig, {"chunk_size": 0}),
    ],
)
def test_values_out_of_range_are_refused(config: type, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(keys)):
        config(**keys)


@attrs.frozen
class JobWithSteps:
    """The one section of a job that schedules look at."""

    train: TrainSection


def test_a_warm_up_longer_than_the_run_is_found_at_validation() -> None:
    job = JobWithSteps(TrainSection(steps=100, seq_len=8))

    assert list(CosineConfig(warmup_steps=99).check(job)) == []
    assert list(ConstantConfig(warmup_steps=100).check(job)) == []
    assert [key for key, _ in CosineConfig(warmup_steps=100).check(job)] == ["warmup_steps"]
    assert [key for key, _ in ConstantConfig(warmup_steps=101).check(job)] == ["warmup_steps"]


def test_muon_alone_is_found_at_validation() -> None:
    muon = MuonConfig(lr=0.02)
    alone, nested = (SimpleNamespace(optimizer=SimpleNamespace(config=config)) for config in (muon, object()))

    assert [key for key, _ in muon.check(alone)] == ["name"]
    assert list(muon.check(nested)) == []


def test_a_last_group_with_a_pattern_only_is_refused() -> None:
    exemption, exception = ParameterGroup(pattern="*.bias"), ParameterGroup(pattern="blocks.*", lr=0.1)

    with pytest.raises(ValueError, match=r"the last group \(pattern '\*\.bias'\) has no effect"):
        AdamWConfig(lr=1e-3, groups=(exception, exemption))
    assert AdamWConfig(lr=1e-3, groups=(exemption, exception)).groups[0].is_exemption


def test_descriptions_and_keys_are_importable_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import forge_plugins_optim.plugin, forge_plugins_optim.config\n"
        "import forge_plugins_optim.cosine, forge_plugins_optim.constant"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
