"""What can be set for routers. Nothing here imports torch.

``contradictions`` of each class: what cannot be with so many experts, (key, sentence). A router refuses it when it is
built, and a layer that knows its number of experts can already refuse it at validation, together with
``contradictions_in``, what cannot be with so many experts in a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs.validators import ge, gt, le, optional

from forge_plugins_moe.exact_share import exact_share

if TYPE_CHECKING:
    from forge_core.config.sections import Job

Order = Literal["topk_softmax", "softmax_topk"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2_sum", "max"]
BalanceScope = Literal["microbatch", "sequence", "global_batch"]
BalanceCounts = Literal["unbiased", "routed"]
BiasSchedule = Literal["constant", "cosine_decay", "linear_warmup"]


@attrs.frozen(kw_only=True)
class TokenChoiceConfig:
    """What routers have in common in which a token chooses its experts."""

    top_k: int = attrs.field(default=2, validator=ge(1))
    """Experts a token visits."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts."""
        if self.top_k > n_experts:
            yield "top_k", f"{self.top_k} experts a token are more than the {n_experts} that there are"


@attrs.frozen(kw_only=True)
class UniformConfig(TokenChoiceConfig):
    """Round-robin."""


def _among_groups(config: TopKConfig, _: attrs.Attribute[Any], value: int | None) -> None:
    if config.n_groups == 1:
        if value is not None:
            raise ValueError("has no effect without n_groups")
    elif value is None:
        raise ValueError(f"must say to how many of the n_groups = {config.n_groups} groups a token may go")
    elif value > config.n_groups:
        raise ValueError(f"must not be above n_groups = {config.n_groups}, got {value}")
    elif value == config.n_groups:
        raise ValueError(f"has no effect: a token may go to all {value} groups; leave both out")


def _with_groups(config: TopKConfig, attribute: attrs.Attribute[Any], value: str) -> None:
    if value != attribute.default and config.n_groups == 1:
        raise ValueError("has no effect without n_groups")


def _with_balance(config: TopKConfig, attribute: attrs.Attribute[Any], value: str) -> None:
    if value != attribute.default and config.balance == 0:
        raise ValueError("has no effect with balance = 0")


def _with_choice_of_counts(config: TopKConfig, attribute: attrs.Attribute[Any], value: str) -> None:
    _with_balance(config, attribute, value)
    if value != attribute.default and config.bias_rate is None and config.n_groups == 1:
        raise ValueError("has no effect with neither a selection bias nor groups: tokens go where their scores say")


def _with_moving_bias(config: TopKConfig, attribute: attrs.Attribute[Any], value: object) -> None:
    if value != attribute.default and not config.bias_rate:
        raise ValueError("has no effect without a bias_rate above 0")


def _with_warmup(config: TopKConfig, attribute: attrs.Attribute[Any], value: float) -> None:
    if value != attribute.default and config.bias_schedule != "linear_warmup":
        raise ValueError('has no effect without bias_schedule = "linear_warmup"')


@attrs.frozen(kw_only=True)
class TopKConfig(TokenChoiceConfig):
    """What ``softmax_topk`` and ``sigmoid_topk`` have in common."""

    route_scale: float = attrs.field(default=1.0, validator=gt(0))
    """Multiplies all weights, last (DeepSeek-V3: 2.5)."""
    gate_bias: bool = False
    """Add a learned bias to the logits (gpt-oss). It is no selection bias: weights have it too."""
    n_groups: int = attrs.field(default=1, validator=ge(1))
    """Groups of neighbouring experts, as on one node; a token goes to few of them (DeepSeek-V3)."""
    groups_per_token: int | None = attrs.field(default=None, validator=[optional(ge(1)), _among_groups])
    """Groups to which a token may go."""
    group_score: GroupScore = attrs.field(default="top2_sum", validator=_with_groups)
    """What makes a group good: the sum of its two best scores (DeepSeek-V3), or its best (DeepSeek-V2). A selection
    bias takes part."""
    balance: float = attrs.field(default=0.0, validator=ge(0))
    """Coefficient of the load-balancing loss; 0 leaves it out. The loss of each layer has the mean 1 a token where all
    is even, and layers add up. Hugging Face's models have one loss for the counts of all layers together, which has
    ``top_k`` there, so that this is their ``router_aux_loss_coef`` times ``top_k`` over the number of sparse layers."""
    balance_scope: BalanceScope = attrs.field(default="global_batch", validator=_with_balance)
    """Over which tokens the load is to be even. ``global_batch``: all of a step; the counts are those of the step
    before, so that the gradient does not depend on how a step is cut. ``sequence``: each sequence, or document in
    packed samples. ``microbatch``: what a rank computes at a time, so that the gradient depends on
    ``train.batch_size`` and ``parallel.cp``."""
    balance_counts: BalanceCounts = attrs.field(default="unbiased", validator=_with_choice_of_counts)
    """Which choices the loss counts: the ones of the scores alone (DeepSeek-V3), or the ones that are made, with
    selection bias and groups."""
    z_loss: float = attrs.field(default=0.0, validator=ge(0))
    """Coefficient of the mean of ``logsumexp(logits)²``, which keeps logits small (ST-MoE: 0.001); 0 leaves it out."""
    bias_rate: float | None = attrs.field(default=None, validator=optional(ge(0)))
    """How much the selection bias of an expert moves in a step, down where the expert has more than the mean load, up
    where less. 0: the bias stays as it is, such as that of a checkpoint. By default there is none."""
    bias_center: bool = attrs.field(default=False, validator=_with_moving_bias)
    """Take from each move of the biases its mean, so that they do not drift together. It changes no choice."""
    bias_schedule: BiasSchedule = attrs.field(default="constant", validator=_with_moving_bias)
    """How ``bias_rate`` changes over the run: not at all, down to 0 along half a cosine, or up from 0 over
    ``bias_warmup``."""
    bias_warmup: float = attrs.field(default=0.1, validator=[gt(0), le(1), _with_warmup])
    """Fraction of the run over which ``linear_warmup`` rises."""
    bias_frozen_from: float = attrs.field(default=1.0, validator=[gt(0), le(1), _with_moving_bias])
    """From this fraction of the run on, the bias stays as it is (DeepSeek-V3: 0.966). ``cosine_decay`` ends there."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts."""
        yield from super().contradictions(n_experts)
        if self.n_groups == 1:
            return
        if n_experts % self.n_groups:
            yield "n_groups", f"{n_experts} experts cannot be put into {self.n_groups} equal groups"
            return
        in_group, groups = n_experts // self.n_groups, self.groups_per_token or self.n_groups
        if self.top_k > in_group * groups:
            sentence = f"{self.top_k} experts a token are more than the {in_group * groups} in {groups} groups"
            yield "top_k", f"{sentence} (groups_per_token)"
        if self.group_score == "top2_sum" and in_group < 2:
            yield "group_score", 'there is one expert a group, and no second best score; set group_score = "max"'


def _teaches_the_gate(config: SoftmaxTopKConfig, _: attrs.Attribute[Any], value: str) -> None:
    if config.top_k == 1 and value == "topk_softmax":
        raise ValueError(
            "a single weight that is normalised is always 1, and the gate would learn nothing from the loss; with "
            'top_k = 1 set order = "softmax_topk"'
        )


def _changes_weights(config: SoftmaxTopKConfig, _: attrs.Attribute[Any], value: bool) -> None:
    if not value:
        return
    if config.order == "topk_softmax":
        raise ValueError('has no effect with order = "topk_softmax": the weights of a token sum to 1 as it is')
    if config.top_k == 1:
        raise ValueError("makes the only weight of a token 1, and the gate would learn nothing from the loss")


@attrs.frozen(kw_only=True)
class SoftmaxTopKConfig(TopKConfig):
    """The experts with the highest probability."""

    order: Order = attrs.field(default="topk_softmax", validator=_teaches_the_gate)
    """``topk_softmax``: the softmax over the chosen logits, so that the weights of a token sum to 1 (Mixtral).
    ``softmax_topk``: the softmax over all of them (Switch, OLMoE)."""
    normalize: bool = attrs.field(default=False, validator=_changes_weights)
    """With ``softmax_topk``, divide the weights of a token by their sum (Qwen3-MoE), which is as ``topk_softmax``."""
    balance: float = attrs.field(default=0.01, validator=ge(0))
    """Coefficient of the load-balancing loss; 0 leaves it out. The loss of each layer has the mean 1 a token where all
    is even, and layers add up. Hugging Face's models have one loss for the counts of all layers together, which has
    ``top_k`` there, so that this is their ``router_aux_loss_coef`` times ``top_k`` over the number of sparse layers."""


def _leaves_something_to_learn(config: SigmoidTopKConfig, _: attrs.Attribute[Any], value: bool) -> None:
    if value and config.top_k == 1:
        raise ValueError(
            "makes the only weight of a token 1, and the gate would learn nothing from the loss; with top_k = 1 set "
            "normalize = false"
        )


@attrs.frozen(kw_only=True)
class SigmoidTopKConfig(TopKConfig):
    """The experts with the highest score, each scored by itself (DeepSeek-V3)."""

    score_function: Literal["sigmoid", "sqrtsoftplus"] = "sigmoid"
    """``sqrtsoftplus`` is √softplus (DeepSeek-V4)."""
    normalize: bool = attrs.field(default=True, validator=_leaves_something_to_learn)
    """Divide the weights of a token by their sum."""
    balance_scope: BalanceScope = attrs.field(default="sequence", validator=_with_balance)
    """Over which tokens the load is to be even. ``sequence``: each sequence, or document in packed samples
    (DeepSeek-V3, with ``balance = 0.0001``). ``global_batch``: all of a step; the counts are those of the step before,
    so that the gradient does not depend on how a step is cut. ``microbatch``: what a rank computes at a time, so that
    the gradient depends on ``train.batch_size`` and ``parallel.cp``."""
    bias_rate: float = attrs.field(default=0.001, validator=ge(0))
    """How much the selection bias of an expert moves in a step, down where the expert has more than the mean load, up
    where less. 0: the bias stays as it is, such as that of a checkpoint."""


@attrs.frozen(kw_only=True)
class SinkhornConfig(TokenChoiceConfig):
    """A balanced assignment of the tokens of a microbatch."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What the weights are of the logits; they are not normalised."""
    iterations: int = attrs.field(default=16, validator=[gt(0), le(1000)])
    """How often rows and columns are normalised in turn. There is no look whether that is enough, for which the host
    would have to wait."""
    z_loss: float = attrs.field(default=0.0, validator=ge(0))
    """Coefficient of the mean of ``logsumexp(logits)²``, which keeps logits small (ST-MoE: 0.001); 0 leaves it out."""


def _is_a_choice(_: object, __: attrs.Attribute[Any], value: int) -> None:
    if value < 2:
        raise ValueError(
            f"must be at least 2, got {value}: a single weight is always 1, and the gate would learn nothing from the "
            "loss"
        )


@attrs.frozen(kw_only=True)
class NoisyTopKConfig(TokenChoiceConfig):
    """Learned noise on the logits."""

    top_k: int = attrs.field(default=2, validator=_is_a_choice)
    """Experts a token visits."""
    importance: float = attrs.field(default=0.1, validator=ge(0))
    """Coefficient of the squared coefficient of variation of the experts' sums of weights; 0 leaves it out."""
    load: float = attrs.field(default=0.1, validator=ge(0))
    """Coefficient of the squared coefficient of variation of the experts' expected numbers of tokens; 0 leaves it
    out."""
    z_loss: float = attrs.field(default=0.0, validator=ge(0))
    """Coefficient of the mean of ``logsumexp(logits)²``, which keeps logits small (ST-MoE: 0.001); 0 leaves it out."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts."""
        if self.top_k >= n_experts:
            yield "top_k", f"{self.top_k} of {n_experts} experts leave no choice on which noise could act"


def _with_gate(config: HashConfig, attribute: attrs.Attribute[Any], value: object) -> None:
    if value != attribute.default and config.weights != "gate":
        raise ValueError('has no effect without weights = "gate"')


def _gate_learns(config: HashConfig, _: attrs.Attribute[Any], value: str) -> None:
    if value == "gate" and config.top_k == 1:
        raise ValueError("normalises the only weight of a token to 1, and the gate would learn nothing; use top_k > 1")


def _without_file(config: HashConfig, attribute: attrs.Attribute[Any], value: str) -> None:
    if value != attribute.default and config.file is not None:
        raise ValueError("has no effect beside file; give one of the two")


@attrs.frozen(kw_only=True)
class HashConfig(TokenChoiceConfig):
    """A token's id decides."""

    top_k: int = attrs.field(default=1, validator=ge(1))
    """Experts a token visits."""
    table: Literal["balanced", "random"] = attrs.field(default="balanced", validator=_without_file)
    """``balanced``: of as many neighbouring ids as there are experts, each expert has as many. ``random``: each id has
    experts of its own, drawn without replacement. Each layer has another table, which follows from ``train.seed``."""
    file: Path | None = None
    """A ``.npy`` file. With one integer for each token id, how often it occurs: ids are dealt out greedily, the most
    frequent first, each to the experts that have the fewest occurrences. With ``(ids, top_k)`` integers, the experts of
    each id. Ids beyond the end of the file go where ``balanced`` sends them."""
    weights: Literal["equal", "gate"] = attrs.field(default="equal", validator=_gate_learns)
    """``equal``: 1 / ``top_k``. ``gate``: a learned gate weighs the experts, normalised (DeepSeek-V4)."""
    score_function: ScoreFunction = attrs.field(default="sqrtsoftplus", validator=_with_gate)
    """What the gate's weights are of its logits; ``sqrtsoftplus`` is √softplus."""
    route_scale: float = attrs.field(default=1.0, validator=[gt(0), _with_gate])
    """Multiplies all weights, last."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts; and a file that is not there."""
        yield from super().contradictions(n_experts)
        if self.file is not None and not _is_there(self.file):
            yield "file", f"there is no file {self.file} (from the folder in which forge was started)"


def _is_there(file: Path) -> bool:
    try:
        return file.expanduser().is_file()
    except (OSError, RuntimeError):  # no name that the system takes, or of no user whom it has
        return False


def _of_sigmoid(config: ExpertChoiceConfig, _: attrs.Attribute[Any], value: bool) -> None:
    if value and config.score_function != "sigmoid":
        raise ValueError(f'is for score_function = "sigmoid", and it is {config.score_function!r}')


@attrs.frozen(kw_only=True)
class ExpertChoiceConfig:
    """Experts choose tokens."""

    experts_per_token: float = attrs.field(default=2.0, validator=gt(0))
    """Experts that a token visits on average: of ``n`` tokens an expert takes ``n · experts_per_token / n_experts``,
    rounded down, so that of a document that is shorter than ``n_experts / experts_per_token`` no expert takes any."""
    scope: Literal["sequence", "batch"] = "sequence"
    """Among which tokens an expert chooses: those of one sequence, or document in packed samples; or all of a
    microbatch, so that the routing depends on ``train.batch_size`` and ``parallel.cp``."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """``softmax`` over the experts (Zhou et al.), ``sigmoid`` for each by itself (MoMa)."""
    gumbel_noise: bool = attrs.field(default=False, validator=_of_sigmoid)
    """In training, scores are ``σ(logit + G′ − G″)`` with two draws of Gumbel's distribution for each token and expert,
    so that experts also try tokens that are not their best (MoMa). The noise is the same in any layout."""
    predictor: bool = False
    """Learn to predict from a token alone which experts will choose it. Evaluation and generated text go by that, and
    without it ``eval/loss`` looks ahead. What the predictor learns from reaches no other parameter."""

    def contradictions(self, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts."""
        if self.experts_per_token > n_experts:
            yield (
                "experts_per_token",
                f"{self.experts_per_token:g} experts a token are more than the {n_experts} that there are",
            )

    def contradictions_in(self, job: Job, n_experts: int) -> Iterator[tuple[str, str]]:
        """What cannot be with so many experts in this job."""
        tokens, among = job.train.seq_len, "train.seq_len"
        if self.scope == "batch":
            tokens = tokens * job.train.batch_size // job.parallel.cp
            among = "train.seq_len, train.batch_size and parallel.cp"
        if tokens * exact_share(self.experts_per_token) < n_experts:  # as the router counts
            sentence = (
                f"of {tokens} tokens ({among}), each of the {n_experts} experts takes {tokens} · "
                f"{self.experts_per_token:g} / {n_experts}, rounded down, which is none; the layer would give nothing"
            )
            yield "experts_per_token", sentence

    def notes(self, job: Job) -> Iterator[tuple[str, str]]:
        """What one should know of it in this job."""
        if self.predictor:
            return
        ahead = (
            "eval/loss looks ahead, as experts choose among later tokens in evaluation, too, and "
            if (job.eval.interval)
            else ""
        )
        yield "predictor", f"{ahead}the model cannot generate text; predictor = true mends it"

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """What is wrong with this router in this job."""
        if self.scope == "sequence" and job.parallel.cp > 1:
            sentence = (
                f"an expert cannot compare the tokens of a sequence that parallel.cp = {job.parallel.cp} puts on "
                'several ranks; set scope = "batch", among the positions of a rank, or parallel.cp = 1'
            )
            yield "scope", sentence
