"""The keys of optimizers, and of averages of weights. Nothing here may import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le, lt, min_len, optional

from forge_core.api import ComponentRef, Slot

if TYPE_CHECKING:
    from forge_core.config.sections import Job


_LEAST = 1e-38
"""Of a number that is added to others in fp32, where a smaller one is 0."""
_MOST: Any = 1e30  # mypy finds no type for gt(0) beside a float
"""Of a learning rate, which fp32 still has after a factor of at most ``10**6``."""
_NEAREST_TO_1: Any = 0.9999999
"""Of a number whose distance to 1 is taken in fp32."""

MATRIX_ROLES = ("matrix", "expert")
Role = Literal["matrix", "embedding", "head", "norm", "bias", "expert"]
Rounding = Literal["nearest", "stochastic", "split"]


def _not_with_lr(group: ParameterGroup, _: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and group.lr is not None:
        raise ValueError("cannot be given together with lr: one replaces the base learning rate, the other scales it")


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """Parameters treated differently, ``[[optimizer.groups]]``. The first group that matches a parameter takes it."""

    pattern: str = attrs.field(validator=min_len(1))
    """Qualified parameter names, such as ``"blocks.*.attention.*"``; ``*`` stands for anything, dots included, ``?``
    for one character, ``[…]`` for one of some. Case matters. A group that takes no parameter is an error."""
    lr: float | None = attrs.field(default=None, validator=optional(and_(ge(0), le(_MOST))))
    """Base learning rate, instead of the optimizer's. It follows the schedule too."""
    lr_scale: float | None = attrs.field(default=None, validator=[optional([ge(0), le(10**6)]), _not_with_lr])
    """Factor on the optimizer's base learning rate."""
    weight_decay: float | None = attrs.field(default=None, validator=optional(ge(0)))
    """Weight decay of everything the pattern takes, norms and biases included; by default what the parameter's role
    has."""

    @property
    def is_exemption(self) -> bool:
        """Return whether it has a ``pattern`` only: what it takes is treated as usual, and kept from the groups
        after it."""
        return self.lr is None and self.lr_scale is None and self.weight_decay is None


def _last_sets_something(_: object, __: attrs.Attribute[Any], groups: tuple[ParameterGroup, ...]) -> None:
    if groups and groups[-1].is_exemption:
        raise ValueError(
            f"the last group (pattern {groups[-1].pattern!r}) has no effect: it sets neither lr, lr_scale nor "
            "weight_decay, and there is no group after it to keep parameters from"
        )


def _shrinks(config: MatrixRules, _: attrs.Attribute[float], value: float) -> None:
    _refuse_growing(value, config.lr)


def _groups_shrink(config: MatrixRules, _: attrs.Attribute[Any], groups: tuple[ParameterGroup, ...]) -> None:
    for group in groups:
        scale = 1.0 if group.lr_scale is None else group.lr_scale
        lr = config.lr * scale if group.lr is None else group.lr
        _refuse_growing(group.weight_decay or 0.0, lr, f"weight_decay of pattern {group.pattern!r} ")


def _refuse_growing(value: float, lr: float, of: str = "") -> None:
    if value > 1 and value * lr > 1:  # below, it is lr that is far too high
        raise ValueError(
            f"{of}must be at most 1 / lr = {1 / lr:g}, or 1 − lr · weight_decay is negative; got {value:g}"
        )


@attrs.frozen(kw_only=True)
class MatrixRules:
    """The keys of every optimizer that says which parameters get which learning rate and weight decay."""

    lr: float = attrs.field(validator=[gt(0), le(_MOST)])
    """Base learning rate, which the schedule multiplies."""
    weight_decay: float = attrs.field(default=0.1, validator=[ge(0), _shrinks])
    """Each step also multiplies a parameter by ``1 − lr · weight_decay``."""
    groups: tuple[ParameterGroup, ...] = attrs.field(default=(), validator=[_last_sets_something, _groups_shrink])
    """Exceptions by parameter name, in order. A group with a ``pattern`` only keeps what it takes from the groups after
    it."""

    @property
    def decayed_roles(self) -> frozenset[str]:
        """The roles that have the weight decay."""
        return frozenset(("matrix", "expert", "head"))


@attrs.frozen(kw_only=True)
class ParameterRules(MatrixRules):
    """The same, of optimizers for parameters of every role."""

    weight_decay: float = attrs.field(default=0.1, validator=[ge(0), _shrinks])
    """Each step also multiplies a decayed parameter by ``1 − lr · weight_decay``. Matrices, experts and an untied head
    are decayed; norms and biases never are; for embedding tables see ``decay_embeddings``."""
    decay_embeddings: bool = False
    """Whether embedding tables are decayed as well. A table that is tied to the head counts as an embedding table."""

    @property
    def decayed_roles(self) -> frozenset[str]:
        """The roles that have the weight decay."""
        return super().decayed_roles | ({"embedding"} if self.decay_embeddings else set())


@attrs.frozen(kw_only=True, slots=False)  # beside another base, one of the two can have slots
class RoundingRules:
    """The key of optimizers that lose no update to bf16."""

    rounding: Rounding = "nearest"
    """How values are rounded that are kept in bf16 (``train.precision = "bf16_pure"``). ``stochastic``: up or down by
    chance, so that updates too small for bf16 count on average. ``split``: the parameter is the upper half of a weight
    in fp32, whose lower half the optimizer keeps, 2 bytes a parameter, with the rest of its state in fp32, so that no
    update is lost. Both compute in fp32."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Nothing is kept in bf16 in other precisions."""
        yield from _rounds_something(self.rounding, job)

    def notes(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is lost to the nearest."""
        if self.rounding == "nearest" and job.train.precision == "bf16_pure":
            yield "rounding", f"{LOST_TO_THE_NEAREST} {_LOST_TO_OTHERS}"


LOST_TO_THE_NEAREST = (
    "values in bf16 are rounded to the nearest, and an update that is small beside a weight is lost: with adamw, by "
    "step 50 one still moves 60 % of the weights at lr 3e-4, 9 % at 3e-5, 3 % at 1e-5."
)
_LOST_TO_OTHERS = '"stochastic" loses none on average, "split" none at all'


def _rounds_something(rounding: Rounding, job: Job, key: str = "rounding") -> Iterator[tuple[str, str]]:
    if rounding != "nearest" and job.train.precision != "bf16_pure":
        sentence = (
            f"{rounding!r} is about what is kept in bf16, and with train.precision = {job.train.precision!r} that is "
            'nothing; leave it out, or set train.precision = "bf16_pure"'
        )
        yield key, sentence


def _not_by_chance(config: CompileRules, _: attrs.Attribute[Any], value: bool) -> None:
    if value and config.rounding == "stochastic":
        raise ValueError('does not go with rounding = "stochastic": what is rounded by chance is not compiled')


@attrs.frozen(kw_only=True, slots=False)
class CompileRules(RoundingRules):
    """The keys of optimizers whose step treats each element by itself."""

    compile: bool = attrs.field(default=False, validator=_not_by_chance)
    """Whether a step is one kernel by torch.compile, which reads and writes each element once. It is compiled before
    the first step, in some seconds, and needs a C++ compiler on a CPU, Triton on a GPU."""


def _has_fp32_beside_bf16(config: AdamWConfig, _: attrs.Attribute[Any], value: bool) -> None:
    if value and (config.keeps != "split" or config.moments == "bf16"):
        raise ValueError(
            'is for rounding = "split" with moments in fp32; to the nearest, torch has a kernel of its own, and what '
            "is rounded by chance is not compiled"
        )


@attrs.frozen(kw_only=True)
class AdamWConfig(ParameterRules):
    """AdamW (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101)."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=deep_iterable(and_(ge(0), lt(1))))
    """Decay of the running means of the gradient and of its square, a step."""
    eps: float = attrs.field(default=1e-8, validator=[ge(_LEAST), le(_MOST)])
    """Added to the root of the second moment."""
    rounding: Rounding = "nearest"
    """How parameters and moments are rounded that are kept in bf16 (``train.precision = "bf16_pure"``).
    ``stochastic``: up or down by chance, so that updates too small for bf16 count on average. ``split``: the parameter
    is the upper half of a weight in fp32, whose lower half the optimizer keeps, 2 bytes a parameter, so that no update
    is lost. Both compute in fp32."""
    moments: Literal["fp32", "bf16"] | None = attrs.field(default=None)
    """The dtype of moments beside split weights: fp32 by default, 8 bytes a parameter; ``bf16`` takes 4, rounded up or
    down by chance. Without ``rounding = "split"`` they have that of their parameter."""
    stochastic_rounding: bool = attrs.field(default=False)
    """Another way to say ``rounding = "stochastic"``."""
    compile: bool = attrs.field(default=False, validator=_has_fp32_beside_bf16)
    """Whether a step is one kernel by torch.compile, beside split weights and moments in fp32. It is compiled before
    the first step, in some seconds, and needs a C++ compiler on a CPU, Triton on a GPU."""

    @moments.validator
    def _are_beside_split_weights(self, _: attrs.Attribute[Any], value: str | None) -> None:
        if value is not None and self.rounding != "split":
            raise ValueError('is for rounding = "split"; otherwise moments have the dtype of their parameter')

    @stochastic_rounding.validator
    def _goes_with_rounding(self, _: attrs.Attribute[Any], value: bool) -> None:
        if value and self.rounding == "split":
            raise ValueError('means rounding = "stochastic", and rounding is "split"; leave one of the two out')

    @property
    def keeps(self) -> Rounding:
        """What both keys say about rounding."""
        return "stochastic" if self.stochastic_rounding else self.rounding

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Nothing is kept in bf16 in other precisions."""
        yield from _rounds_something(self.keeps, job, "stochastic_rounding" if self.stochastic_rounding else "rounding")

    def notes(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is lost to the nearest."""
        if self.keeps == "nearest" and job.train.precision == "bf16_pure":
            yield "rounding", f"{LOST_TO_THE_NEAREST} {_LOST_TO_OTHERS}"


@attrs.frozen(kw_only=True)
class AdamW8bitConfig(ParameterRules, RoundingRules):
    """AdamW with its moments in 8 bits (Dettmers et al., 2022, https://arxiv.org/abs/2110.02861)."""

    betas: tuple[float, float] = attrs.field(
        default=(0.9, 0.95), validator=deep_iterable(and_(ge(0), le(_NEAREST_TO_1)))
    )
    """Decay of the running means of the gradient and of its square, a step."""
    eps: float = attrs.field(default=1e-8, validator=[ge(_LEAST), le(_MOST)])
    """Added to the root of the second moment."""
    min_elements: int = attrs.field(default=4096, validator=ge(0))
    """Parameters of fewer elements keep their moments in fp32, as embedding tables and scalars always do. A resumed run
    keeps moments as its checkpoint has them."""


@attrs.frozen(kw_only=True)
class LionConfig(ParameterRules, CompileRules):
    """Lion (Chen et al., 2023, https://arxiv.org/abs/2302.06675). Its authors use a learning rate 3 to 10 times smaller
    than AdamW's, and a weight decay as many times larger."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.99), validator=deep_iterable(and_(ge(0), lt(1))))
    """Share of the running mean in an update, beside the gradient; and decay of that mean, a step."""


@attrs.frozen(kw_only=True)
class ScheduleFreeAdamWConfig(ParameterRules, CompileRules):
    """Schedule-free AdamW (Defazio et al., 2024, https://arxiv.org/abs/2405.15682). It evaluates an average of its
    steps, which does what a schedule's decay does elsewhere: choose the scheduler ``constant`` with a warm-up. Its
    authors use a learning rate 1 to 10 times larger than AdamW's with a schedule."""

    weight_decay: float = attrs.field(default=0.1, validator=[ge(0), _shrinks])
    """Factor on a decayed parameter that is added to its direction, as AdamW does at a constant learning rate. Which
    are decayed is as everywhere."""
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=deep_iterable(and_(gt(0), lt(1))))
    """Share of the average in the point at which gradients are taken, beside the fast weights; and decay of the running
    mean of the gradient's square, a step."""
    eps: float = attrs.field(default=1e-8, validator=[ge(_LEAST), le(_MOST)])
    """Added to the root of the second moment."""
    r: float = attrs.field(default=0.0, validator=and_(ge(0), le(100)))
    """Step k has the weight ``k^r`` in the average; 0 weighs early steps like late ones."""
    weight_lr_power: float = attrs.field(default=2.0, validator=and_(ge(0), le(100)))
    """A step's weight is also the highest learning rate so far to this power, so that a warm-up counts little; 0
    weighs all alike."""


@attrs.frozen(kw_only=True)
class SGDConfig(ParameterRules, CompileRules):
    """Stochastic gradient descent with momentum, as torch's (Sutskever et al., 2013, section 2)."""

    momentum: float = attrs.field(default=0.9, validator=and_(ge(0), lt(1)))
    """Decay of the running sum of gradients, a step; 0 keeps no state."""
    nesterov: bool = attrs.field(default=False)
    """Whether to step along the gradient plus ``momentum`` times the running sum, and not along the sum alone."""
    decoupled_weight_decay: bool = True
    """Whether decay shrinks the parameter itself, as ``weight_decay`` says (SGDW, https://arxiv.org/abs/1711.05101). If
    not, ``weight_decay · parameter`` is added to the gradient, as torch's SGD does."""

    @nesterov.validator
    def _needs_momentum(self, _: attrs.Attribute[Any], value: bool) -> None:
        if value and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; without one it changes nothing")


@attrs.frozen(kw_only=True)
class StackedMatrices:
    """Parameters that are several matrices, one above the other: ``stacked`` of muon."""

    pattern: str = attrs.field(validator=min_len(1))
    """Qualified parameter names, such as ``"blocks.*.qkv.weight"``, as in ``groups``. The first that matches a
    parameter counts; one that matches none is an error."""
    rows: tuple[int, ...] = attrs.field(validator=[min_len(2), deep_iterable(ge(1))])
    """Rows (output features) of each matrix, from above, such as ``[512, 128, 128]``. They add up to the
    parameter's."""


@attrs.frozen(kw_only=True)
class MuonConfig(MatrixRules, RoundingRules):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon), for matrices and experts alone."""

    momentum: float = attrs.field(default=0.95, validator=and_(ge(0), lt(1)))
    """Decay of the running mean of the gradient, a step."""
    nesterov: bool = True
    """Whether to orthogonalise the mean of gradient and running mean, and not the running mean alone."""
    iterations: int = attrs.field(default=5, validator=and_(ge(1), le(20)))
    """Newton–Schulz iterations. Five bring singular values to between 0.7 and 1.2."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """The dtype in which matrices travel and are iterated; sums are fp32."""
    scale: Literal["spectral", "match_adamw_rms"] = "spectral"
    """The factor on a step for a matrix of m rows and n columns. ``spectral``: √max(1, m/n), so that outputs change
    alike at any shape, with learning rates about 0.02. ``match_adamw_rms``: 0.2 · √max(m, n), so that elements change
    as much as AdamW's, with its learning rates and decay (Liu et al., 2025, https://arxiv.org/abs/2502.16982)."""
    stacked: tuple[StackedMatrices, ...] = ()
    """Fused projections, such as queries, keys and values in one parameter: each of their matrices is orthogonalised
    and scaled by itself."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """It cannot be all of a job's optimizer: every model has embeddings."""
        yield from super().check(job)
        if job.optimizer.config is self:
            yield "name", MUON_ALONE


@attrs.frozen(kw_only=True)
class AdafactorConfig(ParameterRules):
    """Adafactor (Shazeer and Stern, 2018, https://arxiv.org/abs/1804.04235)."""

    beta1: float = attrs.field(default=0.0, validator=and_(ge(0), lt(1)))
    """Decay of the running mean of updates, a step; 0 keeps none, and with it most of the memory of AdamW's state."""
    decay_power: float = attrs.field(default=0.8, validator=and_(gt(0), le(1)))
    """In update t, means of squares keep ``1 − t^−decay_power`` of what they were."""
    clip_threshold: float = attrs.field(default=1.0, validator=gt(0))
    """The largest root mean square of a parameter's update before the learning rate multiplies it."""
    eps: tuple[float, float] = attrs.field(default=(1e-30, 1e-3), validator=deep_iterable(and_(ge(_LEAST), le(1))))
    """Added to squares of gradients; and the least size of a parameter for ``scale_parameter``."""
    scale_parameter: bool = False
    """Whether the learning rate of a parameter is multiplied by its root mean square, as in the paper. If not, it is
    about as large as AdamW's."""
    relative_step: bool = False
    """Whether the learning rate is multiplied by ``min(0.01, 1/√t)`` in update t. With ``lr = 1.0`` and the schedule
    ``none`` it is that of the paper."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How parameters are rounded that are kept in bf16 (``train.precision = "bf16_pure"``). ``stochastic``: up or down
    by chance, so that updates too small for bf16 count on average."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Nothing is kept in bf16 in other precisions."""
        yield from _rounds_something(self.rounding, job)

    def notes(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is lost to the nearest."""
        if self.rounding == "nearest" and job.train.precision == "bf16_pure":
            yield (
                "rounding",
                f'{LOST_TO_THE_NEAREST} "stochastic" loses none on average, train.precision = "bf16" none at all',
            )


@attrs.frozen(kw_only=True)
class OptimizerGroup:
    """Parameters and their optimizer, ``[[optimizer.groups]]``."""

    optimizer: Annotated[ComponentRef, Slot("optimizer")]
    """What updates them, with all of its own keys."""
    roles: tuple[Role, ...] = ()
    """The roles of parameters, as models declare them."""
    patterns: tuple[str, ...] = attrs.field(default=(), validator=deep_iterable(min_len(1)))
    """Qualified parameter names, such as ``"blocks.*.attention.*"``; ``*`` stands for anything, dots included; or
    groups that the model names, such as ``"@connector"``. With ``roles`` as well, a parameter needs both. A group with
    neither takes what the others leave."""

    @property
    def takes_the_rest(self) -> bool:
        """Return whether it says nothing of which parameters are its own."""
        return not self.roles and not self.patterns


@attrs.frozen(kw_only=True)
class GroupedConfig:
    """One optimizer on some parameters, and another on the rest. Each parameter must be in exactly one group."""

    groups: tuple[OptimizerGroup, ...] = attrs.field(validator=min_len(1))
    """Parameters by role or name, each with an optimizer. The schedule multiplies the learning rates of all of them;
    the first group's is logged."""

    @groups.validator
    def _one_takes_the_rest(self, _: attrs.Attribute[Any], groups: tuple[OptimizerGroup, ...]) -> None:
        if sum(group.takes_the_rest for group in groups) > 1:
            raise ValueError("has several groups with neither roles nor patterns, and one alone can take the rest")

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Muon takes no other roles than those of matrices; beside patterns they may have no parameter."""
        for index, group in enumerate(self.groups):
            others = [role for role in group.roles if role not in MATRIX_ROLES]
            if others and not group.patterns and isinstance(group.optimizer.config, MuonConfig):
                yield f"groups[{index}].roles", f"muon takes {' and '.join(MATRIX_ROLES)}; got {others[0]!r}"


@attrs.frozen(kw_only=True)
class EMAConfig:
    """An exponential moving average of the weights (Polyak and Juditsky, 1992, with forgetting)."""

    decay: float = attrs.field(default=0.999, validator=and_(gt(0), lt(1)))
    """What is left of the average after an update of it: its memory is ``interval / (1 − decay)`` steps."""
    interval: int = attrs.field(default=1, validator=ge(1))
    """Steps between updates of the average."""
    warm_up: bool = False
    """Whether the decay rises, as ``min(decay, (1 + n) / (10 + n))`` after n updates, so that the average forgets
    weights of the beginning sooner."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """Two averages of the same weights."""
        chosen = job.optimizer.config
        parts = [one.optimizer for one in chosen.groups] if isinstance(chosen, GroupedConfig) else [job.optimizer]
        for part in parts:
            if isinstance(part.config, ScheduleFreeAdamWConfig):
                yield "name", f"{part.name} has an average to evaluate itself; leave out one of the two"
        first, *others = (index for index, one in enumerate(job.callbacks) if isinstance(one.config, EMAConfig))
        if any(job.callbacks[index].config is self for index in others):
            yield "name", f"callbacks[{first}] has an average to evaluate itself; leave out one of the two"


MUON_ALONE = (
    "muon is for matrices, and a model has embeddings, norms and a head as well. Use optimizer 'grouped' with "
    '[[optimizer.groups]] roles = ["matrix", "expert"], optimizer = {name = "muon", …}, and another group for the rest'
)
