"""What this package registers."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.5"


@hookimpl
def forge_optimizers() -> Iterator[Component]:
    """Optimizers."""
    yield Component(
        name="adafactor",
        summary="Adafactor: second moments of matrices by row and column, and no first moment unless asked for",
        factory="forge_plugins_optim.adafactor:Adafactor",
        config="forge_plugins_optim.config:AdafactorConfig",
    )
    yield Component(
        name="adamw",
        summary="AdamW with decoupled weight decay, one fused kernel; decays matrices only",
        factory="forge_plugins_optim.adamw:adamw",
        config="forge_plugins_optim.config:AdamWConfig",
    )
    yield Component(
        name="adamw_8bit",
        summary="AdamW with its moments in 8 bits by blocks: a quarter of the memory of its state",
        factory="forge_plugins_optim.adamw_8bit:AdamW8bit",
        config="forge_plugins_optim.config:AdamW8bitConfig",
    )
    yield Component(
        name="grouped",
        summary="one optimizer on some parameters and another on the rest, by role or name",
        factory="forge_plugins_optim.grouped:Grouped",
        config="forge_plugins_optim.config:GroupedConfig",
    )
    yield Component(
        name="lion",
        summary="Lion: steps of one length against the sign of a momentum, which is all its state",
        factory="forge_plugins_optim.lion:Lion",
        config="forge_plugins_optim.config:LionConfig",
    )
    yield Component(
        name="muon",
        summary="Muon: momentum made orthogonal, for matrices and experts; 'grouped' gives the rest another",
        factory="forge_plugins_optim.muon:Muon",
        config="forge_plugins_optim.config:MuonConfig",
    )
    yield Component(
        name="schedule_free_adamw",
        summary="AdamW without a schedule: an average of its steps is evaluated in place of the weights",
        factory="forge_plugins_optim.schedule_free:ScheduleFreeAdamW",
        config="forge_plugins_optim.config:ScheduleFreeAdamWConfig",
    )
    yield Component(
        name="sgd",
        summary="gradient descent with momentum, Nesterov's if wanted, and weight decay of either kind",
        factory="forge_plugins_optim.sgd:SGD",
        config="forge_plugins_optim.config:SGDConfig",
    )


@hookimpl
def forge_schedulers() -> Iterator[Component]:
    """Learning-rate schedules."""
    summaries = {
        ("constant", "constant", "Constant"): "the base learning rate throughout, after a warm-up",
        (
            "cosine",
            "decay",
            "Cosine",
        ): "half a cosine from the base learning rate down to a fraction of it, after a warm-up",
        ("linear", "decay", "Linear"): "a straight line down to a fraction of the base learning rate, after a warm-up",
        ("polynomial", "decay", "Polynomial"): "a power of what is left of the decay, with a floor, after a warm-up",
        ("rex", "decay", "Rex"): "REX: slowly at first and fast at the end, after a warm-up",
        ("wsd", "wsd", "WSD"): "warm-up, stable, and a cooldown over the last part of the run",
        ("inverse_sqrt", "inverse_sqrt", "InverseSqrt"): "one over the root of the step, after a warm-up",
        ("piecewise", "piecewise", "Piecewise"): "constant in parts of the run, as in step decay, after a warm-up",
        ("none", "none", "None"): "no schedule, for optimizers that have one of their own",
    }
    for (name, module, config), summary in summaries.items():
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_optim.{module}:{name}",
            config=f"forge_plugins_optim.schedule_config:{config}Config",
        )


@hookimpl
def forge_losses() -> Iterator[Component]:
    """Losses."""
    yield Component(
        name="cross_entropy",
        summary="next-token cross-entropy in fp32, on the full logits",
        factory="forge_plugins_optim.cross_entropy:cross_entropy",
        config="forge_plugins_optim.loss_config:CrossEntropyConfig",
    )
    yield Component(
        name="chunked_cross_entropy",
        summary="the same cross-entropy with the head in chunks of tokens, so that the full logits never exist",
        factory="forge_plugins_optim.chunked_cross_entropy:chunked_cross_entropy",
        config="forge_plugins_optim.loss_config:ChunkedCrossEntropyConfig",
    )
    yield Component(
        name="dpo",
        summary="direct preference optimisation: of two answers, the preferred one becomes likelier",
        factory="forge_plugins_optim.dpo:dpo",
        config="forge_plugins_optim.loss_config:DPOConfig",
    )
    yield Component(
        name="label_smoothing",
        summary="another loss with targets of which a part is spread over the vocabulary",
        factory="forge_plugins_optim.label_smoothing:label_smoothing",
        config="forge_plugins_optim.loss_config:LabelSmoothingConfig",
    )
    yield Component(
        name="own",
        summary="the loss that the model computes itself, as autoencoders do",
        factory="forge_plugins_optim.own_loss:own_loss",
        config="forge_plugins_optim.loss_config:OwnLossConfig",
    )
    yield Component(
        name="z_loss",
        summary="another loss and a penalty on the squared log-partition (PaLM)",
        factory="forge_plugins_optim.z_loss:z_loss",
        config="forge_plugins_optim.loss_config:ZLossConfig",
    )


@hookimpl
def forge_parametrizations() -> Iterator[Component]:
    """How rates and initial values follow from the size of a model."""
    yield Component(
        name="standard",
        summary="the model's own initial values, and one rate for all parameters",
        factory="forge_plugins_optim.maximal_update:Standard",
        config="forge_plugins_optim.parametrization_config:StandardConfig",
    )
    yield Component(
        name="mup",
        summary="µP: rates found with a narrow model hold for a wide one",
        factory="forge_plugins_optim.maximal_update:MaximalUpdate",
        config="forge_plugins_optim.parametrization_config:MupConfig",
    )
    yield Component(
        name="complete_p",
        summary="CompleteP: µP, and rates found with few layers hold for many",
        factory="forge_plugins_optim.maximal_update:CompleteP",
        config="forge_plugins_optim.parametrization_config:CompletePConfig",
    )


@hookimpl
def forge_phase_plans() -> Iterator[Component]:
    """What ``[[phases]]`` asks for."""
    yield Component(
        name="phases",
        summary="parameters are trained by patterns of their names, each with its factor on the rate",
        factory="forge_plugins_optim.phases:Phases",
    )


@hookimpl
def forge_callbacks() -> Iterator[Component]:
    """An average of the weights, with any optimizer."""
    yield Component(
        name="ema",
        summary="an exponential moving average of the weights, which is evaluated in their place",
        factory="forge_plugins_optim.ema:EMA",
        config="forge_plugins_optim.config:EMAConfig",
    )


@hookimpl
def forge_commands() -> Iterator[Command]:
    """``forge plot-schedule``."""
    yield Command(
        name="plot-schedule",
        summary="draw the learning rate of a job over its steps",
        run="forge_plugins_optim.plot_schedule:plot_schedule",
    )
