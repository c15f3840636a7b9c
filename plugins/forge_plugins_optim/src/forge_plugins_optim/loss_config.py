"""The keys of losses. Nothing here may import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import attrs
from attrs.validators import and_, ge, gt, le, lt

from forge_core.api import ComponentRef, Slot

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class CrossEntropyConfig:
    """Cross-entropy on the full logits has no keys."""


@attrs.frozen(kw_only=True)
class ChunkedCrossEntropyConfig:
    """Cross-entropy with the head applied in chunks."""

    chunk_size: int = attrs.field(default=2048, validator=gt(0))
    """Tokens whose logits exist at one time. They take ``chunk_size · V`` numbers in fp32, and as many in the compute
    dtype. Smaller chunks take less memory, and on a GPU more time: on an H200 with 16,384 tokens in bf16, D = 4096 and
    V = 128,256, chunks of 512, 1024, 2048, 4096 took 1.29, 1.07, 1.01, 0.98 times as long as the full logits do, and
    0.14, 0.17, 0.26, 0.42 times the memory."""
    kernel: Literal["torch", "triton"] = "torch"
    """``triton``, on a GPU: softmax, loss and gradient of a chunk by two kernels, in the memory of its logits, which
    then exist once, in the compute dtype. Its gain has not been measured yet. `forge plan` needs a GPU for it, too, and
    plans with the memory of ``torch``."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """A kernel of a GPU is not for a CPU."""
        if self.kernel == "triton" and job.run.device in ("cpu", "mps"):
            yield "kernel", f"'triton' runs on a GPU, and run.device is {job.run.device!r}; leave kernel out"


@attrs.frozen(kw_only=True)
class ZLossConfig:
    """A penalty on the log-partition (Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, section 5)."""

    coefficient: float = attrs.field(default=1e-4, validator=and_(gt(0), le(10**6)))
    """Factor on the squared log-partition of a token, in nats²."""
    loss: Annotated[ComponentRef, Slot("loss", default="cross_entropy")]
    """The loss that the penalty is added to."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """It is about targets, each of which counts by itself, and once."""
        return _of_targets(self)


@attrs.frozen(kw_only=True)
class LabelSmoothingConfig:
    """Label smoothing (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567, section 7)."""

    smoothing: float = attrs.field(default=0.1, validator=and_(gt(0), lt(1)))
    """The part of the target's probability that is spread over the whole vocabulary."""
    loss: Annotated[ComponentRef, Slot("loss", default="cross_entropy")]
    """The loss whose targets are smoothed."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """It is about targets, each of which counts by itself, and once."""
        return _of_targets(self)


@attrs.frozen(kw_only=True)
class DPOConfig:
    """Direct preference optimisation (Rafailov et al., 2023, https://arxiv.org/abs/2305.18290), of pairs of answers as
    the data source ``preference_pairs`` has them."""

    beta: float = attrs.field(default=0.1, validator=and_(gt(0), le(10**6)))
    """How dear it is to leave the reference, β: the smaller, the further the model goes."""
    label_smoothing: float = attrs.field(default=0.0, validator=[ge(0), lt(0.5)])
    """The part of the pairs whose answers are thought to be the wrong way round, ε (conservative DPO)."""
    loss: Annotated[ComponentRef, Slot("loss", default="cross_entropy")]
    """The loss that gives log-probabilities: ``cross_entropy``, or ``chunked_cross_entropy`` for less memory."""

    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        """A loss that adds to another one does not give log-probabilities."""
        if hasattr(self.loss.config, "loss"):
            what = "must give log-probabilities alone, as cross_entropy and chunked_cross_entropy do"
            yield "loss", f"{what}; {self.loss.name} adds to them"


@attrs.frozen(kw_only=True)
class OwnLossConfig:
    """``own`` has no keys."""


def _of_targets(config: ZLossConfig | LabelSmoothingConfig) -> Iterator[tuple[str, str]]:
    inside: ComponentRef | None = config.loss
    if isinstance(config.loss.config, DPOConfig | OwnLossConfig):
        yield "loss", f"must be a loss of single targets, such as cross_entropy; {config.loss.name} is none"
    while inside is not None and not isinstance(inside.config, type(config)):
        inside = getattr(inside.config, "loss", None)
    if inside is not None:
        yield "loss", f"has {inside.name} in it, which {inside.name} cannot stand around; keep one of them"
