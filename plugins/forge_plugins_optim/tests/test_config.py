"""Ranges, and what is said about the rest of the job; no torch is needed for either."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from forge_core.config.sections import TrainSection
from forge_core.errors import ForgeError
from forge_core.job import load_job, notes
from forge_core.registry.discovery import discover
from forge_plugins_optim.config import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    EMAConfig,
    LionConfig,
    MuonConfig,
    ParameterGroup,
    ScheduleFreeAdamWConfig,
    SGDConfig,
)
from forge_plugins_optim.loss_config import ChunkedCrossEntropyConfig, LabelSmoothingConfig, ZLossConfig
from forge_plugins_optim.schedule_config import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    PiecewiseConfig,
    PolynomialConfig,
    WSDConfig,
)
from parity_matrix.launch import JOB


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (AdamWConfig, {"lr": 0.0}),
        (AdamWConfig, {"lr": -1.0}),
        (AdamWConfig, {"lr": 0.1, "betas": (0.9, 1.0)}),
        (AdamWConfig, {"lr": 0.1, "betas": (-0.1, 0.9)}),
        (AdamWConfig, {"lr": 1e31}),
        (AdamWConfig, {"lr": 0.1, "eps": 0.0}),
        (AdamWConfig, {"lr": 0.1, "eps": 1e-46}),
        (AdamWConfig, {"lr": 0.1, "eps": 1e300}),
        (AdamWConfig, {"lr": 0.1, "weight_decay": -0.1}),
        (AdamWConfig, {"lr": 0.1, "weight_decay": 10.1}),
        (AdafactorConfig, {"lr": 0.1, "beta1": 1.0}),
        (AdafactorConfig, {"lr": 0.1, "decay_power": 0.0}),
        (AdafactorConfig, {"lr": 0.1, "clip_threshold": 0.0}),
        (AdafactorConfig, {"lr": 0.1, "eps": (0.0, 1e-3)}),
        (AdafactorConfig, {"lr": 0.1, "eps": (1e-46, 1e-3)}),
        (AdafactorConfig, {"lr": 0.1, "eps": (1e300, 1e-3)}),
        (AdafactorConfig, {"lr": 0.1, "eps": (1e-30, 1e300)}),
        (AdamW8bitConfig, {"lr": 0.1, "min_elements": -1}),
        (AdamW8bitConfig, {"lr": 0.1, "betas": (0.9, 0.9999999999999999)}),
        (AdamW8bitConfig, {"lr": 0.1, "eps": 1e300}),
        (LionConfig, {"lr": 0.1, "betas": (0.9, 1.0)}),
        (MuonConfig, {"lr": 0.1, "iterations": 0}),
        (MuonConfig, {"lr": 0.1, "momentum": 1.0}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "betas": (0.0, 0.9)}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "eps": 1e300}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "r": 1e9}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "weight_lr_power": 1e9}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "betas": (0.9, 1.0)}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "r": -1.0}),
        (ScheduleFreeAdamWConfig, {"lr": 0.1, "weight_lr_power": -1.0}),
        (EMAConfig, {"decay": 1.0}),
        (EMAConfig, {"decay": 0.0}),
        (EMAConfig, {"interval": 0}),
        (SGDConfig, {"lr": 0.1, "momentum": 1.0}),
        (SGDConfig, {"lr": 0.1, "nesterov": True, "momentum": 0.0}),
        (ParameterGroup, {"pattern": ""}),
        (ParameterGroup, {"pattern": "*", "lr": -1.0}),
        (ParameterGroup, {"pattern": "*", "lr": 1.0, "lr_scale": 1.0}),
        (ConstantConfig, {"warmup_steps": -1}),
        (CosineConfig, {"min_ratio": 1.5}),
        (CosineConfig, {"min_ratio": -0.1}),
        (CosineConfig, {"decay_steps": 0}),
        (LinearConfig, {"warmup_fraction": 1.1}),
        (LinearConfig, {"warmup_fraction": -0.1}),
        (LinearConfig, {"warmup_tokens": 0.0}),
        (LinearConfig, {"warmup_tokens": 1.0, "warmup_steps": 1}),
        (LinearConfig, {"warmup_tokens": 1.0, "warmup_fraction": 0.1}),
        (PolynomialConfig, {"power": 0.0}),
        (InverseSqrtConfig, {"timescale": 0}),
        (WSDConfig, {"cooldown_fraction": 0.0}),
        (WSDConfig, {"cooldown_steps": 1, "cooldown_fraction": 0.1}),
        (PiecewiseConfig, {"boundaries": (), "ratios": (1.0,)}),
        (PiecewiseConfig, {"boundaries": (-1,), "ratios": (1.0, 1.0)}),
        (PiecewiseConfig, {"boundaries": (10,), "ratios": (1.0, -1.0)}),
        (PiecewiseConfig, {"boundaries": (10,), "ratios": (1.0, 1e300)}),
        (ChunkedCrossEntropyConfig, {"chunk_size": 0}),
        (ZLossConfig, {"coefficient": 0.0, "loss": None}),
        (ZLossConfig, {"coefficient": 1e300, "loss": None}),
        (LabelSmoothingConfig, {"smoothing": 0.0, "loss": None}),
        (LabelSmoothingConfig, {"smoothing": 1.0, "loss": None}),
    ],
)
def test_values_out_of_range_are_refused(config: type, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(keys)):
        config(**keys)


@pytest.mark.parametrize(
    ("boundaries", "ratios", "sentence"),
    [
        ((20, 10), (1, 1, 1), "must be in ascending order, got 10 after 20"),
        ((10, 10), (1, 1, 1), "must be in ascending order, got 10 after 10"),
        ((0.5, 10), (1, 1, 1), "must be all steps or all fractions of the run, got 0.5 and 10"),
        ((10.5,), (1, 1), "must be whole steps, or fractions of the run below 1; got 10.5"),
        ((10,), (1,), "must have one value more than boundaries has, as 1 boundaries make 2 parts; got 1"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(boundaries, ratios, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        PiecewiseConfig(boundaries=boundaries, ratios=ratios)


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
    assert [key for key, _ in CosineConfig(warmup_fraction=1.0).check(job)] == ["warmup_fraction"]


def test_a_warm_up_in_tokens_is_checked_at_validation_if_the_tokens_of_a_step_are_known():
    known = JobWithSteps(TrainSection(steps=100, seq_len=8, global_batch_size=4))
    unknown = JobWithSteps(TrainSection(steps=100, seq_len=8))

    assert [key for key, _ in CosineConfig(warmup_tokens=3200).check(known)] == ["warmup_tokens"]
    assert [key for key, _ in WSDConfig(warmup_tokens=3200).check(known)] == ["cooldown_fraction"]
    for config in (CosineConfig, WSDConfig):
        assert list(config(warmup_tokens=2500).check(known)) == []
        assert list(config(warmup_tokens=3200).check(unknown)) == []


def test_muon_alone_is_found_at_validation() -> None:
    muon = MuonConfig(lr=0.02)
    alone, nested = (SimpleNamespace(optimizer=SimpleNamespace(config=config)) for config in (muon, object()))

    assert [key for key, _ in muon.check(alone)] == ["name"]
    assert list(muon.check(nested)) == []


def test_an_average_beside_an_optimizer_that_has_one_is_found_at_validation() -> None:
    both = ["optimizer={name='schedule_free_adamw', lr=3e-3}", "callbacks=[{name='ema'}]"]

    with pytest.raises(ForgeError, match=r"callbacks\[0\]\.name: .*schedule_free_adamw has an average"):
        load_job(JOB, both, catalog=discover(), world_size=1)
    load_job(JOB, ["callbacks=[{name='ema'}]"], catalog=discover(), world_size=1)
    grouped = "optimizer={name='grouped', groups=[{optimizer={name='schedule_free_adamw', lr=3e-3}}]}"
    with pytest.raises(ForgeError, match=r"callbacks\[0\]\.name: .*schedule_free_adamw has an average"):
        load_job(JOB, [grouped, "callbacks=[{name='ema'}]"], catalog=discover(), world_size=1)


def test_two_averages_are_found_at_validation_and_named() -> None:
    both = ["callbacks=[{name='smoothed'}, {name='ema'}, {name='ema', decay=0.9}]"]

    with pytest.raises(ForgeError, match=r"callbacks\[2\]\.name: callbacks\[1\] has an average") as found:
        load_job(JOB, both, catalog=discover(), world_size=1)
    assert str(found.value).count("average") == 1


@pytest.mark.parametrize("outer", ["z_loss", "label_smoothing"])
@pytest.mark.parametrize("inner", ["dpo", "own"])
def test_a_penalty_on_targets_is_not_put_around_a_loss_that_is_not_of_targets(outer: str, inner: str) -> None:
    """It never gave ``dpo`` the answers of a pair, which then was its inner loss of one token of each, in silence."""

    def load(inner: str) -> None:
        load_job(JOB, ["callbacks=[]", f"loss={{name='{outer}', loss='{inner}'}}"], catalog=discover(), world_size=1)

    with pytest.raises(ForgeError, match=rf"loss\.loss: must be a loss of single targets, .*; {inner} is none"):
        load(inner)
    load("cross_entropy")


@pytest.mark.parametrize(("outer", "other"), [("z_loss", "label_smoothing"), ("label_smoothing", "z_loss")])
def test_a_penalty_on_targets_is_not_put_around_itself(outer: str, other: str) -> None:
    """Both are linear in their factor; one line of the log had the sum of two."""

    def load(inner: str) -> None:
        load_job(JOB, ["callbacks=[]", f"loss={{name='{outer}', loss={inner}}}"], catalog=discover(), world_size=1)

    for inner in (f"'{outer}'", f"{{name='{other}', loss='{outer}'}}"):
        with pytest.raises(ForgeError, match=rf"loss\.loss: has {outer} in it, which {outer} cannot stand around"):
            load(inner)
    load(f"'{other}'")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (AdamWConfig(lr=0.1, stochastic_rounding=True), "stochastic_rounding"),
        (AdamWConfig(lr=0.1, rounding="stochastic"), "rounding"),
        (AdamWConfig(lr=0.1, rounding="split"), "rounding"),
        (LionConfig(lr=0.1, rounding="split"), "rounding"),
        (MuonConfig(lr=0.1, rounding="split"), "rounding"),
        (SGDConfig(lr=0.1, rounding="stochastic"), "rounding"),
        (AdafactorConfig(lr=0.1, rounding="stochastic"), "rounding"),
    ],
)
def test_rounding_of_nothing_is_found_at_validation(config, named) -> None:
    of = lambda precision: SimpleNamespace(  # noqa: E731 - a job
        train=SimpleNamespace(precision=precision), optimizer=SimpleNamespace(config=None)
    )
    ((key, sentence),) = config.check(of("bf16"))

    assert key == named
    assert "with train.precision = 'bf16' that is nothing" in sentence
    assert list(config.check(of("bf16_pure"))) == list(AdamWConfig(lr=0.1).check(of("bf16"))) == []


@pytest.mark.parametrize("name", ["adafactor", "adamw", "adamw_8bit", "lion", "muon", "schedule_free_adamw", "sgd"])
def test_what_rounding_to_the_nearest_loses_is_said_at_validation_and_at_the_start(name: str) -> None:
    def said(precision: str, rounding: str = "") -> list[str]:
        inner = f'{{name="{name}", lr=1e-3{rounding}}}'
        rest = '{name="adamw", lr=1.0, rounding="split"}' if precision == "bf16_pure" else '{name="adamw", lr=1.0}'
        groups = f'[{{roles=["matrix"], optimizer={inner}}}, {{optimizer={rest}}}]'
        settings = ["callbacks=[]", f"train.precision={precision}", f'optimizer={{name="grouped", groups={groups}}}']
        return notes(load_job(JOB, settings, catalog=catalog), catalog)

    catalog = discover()
    (line,) = said("bf16_pure")
    assert re.match(r"optimizer\.groups\S+optimizer\.(rounding|name): .* 9 % at 3e-5, .* loses none", line)
    assert said("bf16") == []
    if name != "adafactor":
        assert said("bf16_pure", ', rounding="split"') == []
    assert said("bf16_pure", ', rounding="stochastic"') == []
    if name == "adamw":
        assert said("bf16_pure", ", stochastic_rounding=true") == []


def test_rounding_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match='means rounding = "stochastic", and rounding is "split"'):
        AdamWConfig(lr=0.1, rounding="split", stochastic_rounding=True)
    with pytest.raises(ValueError, match='is for rounding = "split"'):
        AdamWConfig(lr=0.1, rounding="stochastic", moments="bf16")
    with pytest.raises(ValueError, match="what is rounded by chance is not compiled"):
        LionConfig(lr=0.1, rounding="stochastic", compile=True)


def test_a_last_group_with_a_pattern_only_is_refused() -> None:
    exemption, exception = ParameterGroup(pattern="*.bias"), ParameterGroup(pattern="blocks.*", lr=0.1)

    with pytest.raises(ValueError, match=r"the last group \(pattern '\*\.bias'\) has no effect"):
        AdamWConfig(lr=1e-3, groups=(exception, exemption))
    assert AdamWConfig(lr=1e-3, groups=(exemption, exception)).groups[0].is_exemption


@pytest.mark.parametrize("lr", [{}, {"lr_scale": 10.0}, {"lr": 1.0}])
def test_the_decay_of_a_group_turns_no_signs(lr) -> None:
    """By its own learning rate."""
    group = ParameterGroup(pattern="*.bias", weight_decay=11.0, **lr)

    AdamWConfig(lr=1e-3, groups=(attrs.evolve(group, weight_decay=1.0),))
    with pytest.raises(ValueError, match=r"weight_decay of pattern '\*\.bias' must be at most 1 / lr = 1"):
        AdamWConfig(lr=0.1, groups=(group,))


def test_descriptions_and_keys_are_importable_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import forge_plugins_optim.plugin, forge_plugins_optim.config\n"
        "import forge_plugins_optim.decay, forge_plugins_optim.piecewise, forge_plugins_optim.plot_schedule"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
