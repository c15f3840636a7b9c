"""What a machine takes for an operation: by published figures of a GPU, or by a calibration."""

from __future__ import annotations

from typing import Protocol

import attrs

from forge_core.contracts.gpu import Gpu
from forge_plugins_plan.work import ALL_REDUCE, ALL_TO_ALL, ATTENTION, COLLECTIVES, PRODUCT, RECEIVE, SEND, Work


class Machine(Protocol):
    """Times of operations, in seconds, each as if it were alone."""

    @property
    def words(self) -> str:
        """What it is, and where the figures are from."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the host asks for operations and goes on, and collectives can run beside others: a GPU's do."""

    @property
    def host_seconds(self) -> float:
        """What the host takes to ask for one operation."""

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s that MFU is a share of: a GPU's in bf16, for any dtype; a CPU's in ``dtype``."""

    def seconds(self, work: Work) -> float:
        """What the operation takes once it has been asked for."""


@attrs.frozen
class Links:
    """How ranks reach each other."""

    latency: float
    """Seconds that a collective takes at least."""
    bandwidth: float
    """Bytes a second that one rank sends while it receives as many."""


@attrs.frozen(kw_only=True)
class Figures:
    """Of a GPU, from data sheets."""

    fp32_tflops: float
    """Without TF32, which torch does not use unless told."""
    memory_tb: float
    """TB/s."""
    within_gb: float
    """GB/s of NVLink, one way."""
    between_gb: float
    """GB/s of a GPU's share of its node's network, one way: a card of 200 Gb/s for each A100, of 400 for the others."""


PUBLISHED = {
    "a100-40": Figures(fp32_tflops=19.5, memory_tb=1.555, within_gb=300, between_gb=25),
    "a100-80": Figures(fp32_tflops=19.5, memory_tb=2.039, within_gb=300, between_gb=25),
    "b200": Figures(fp32_tflops=75, memory_tb=8.0, within_gb=900, between_gb=50),
    "h100": Figures(fp32_tflops=67, memory_tb=3.35, within_gb=450, between_gb=50),
    "h200": Figures(fp32_tflops=67, memory_tb=4.8, within_gb=450, between_gb=50),
}

PRODUCTS = 0.77
"""Of the peak, that large products reach in a long run: 730 to 798 of 989 TFLOP/s on one H200 and in lists."""
ATTENTIONS = 0.5
"""Of the peak, that attention reaches, by the FLOPs of the half that a causal mask leaves: cuDNN 499 to 529 of 989."""
MEMORY = 0.83
"""Of the memory's bandwidth, that kernels reach: 4.0 of 4.8 TB/s."""
WITHIN, BETWEEN = 0.8, 0.7
"""Of the links' bandwidth: 360 of 450 GB/s in traces of NCCL; between nodes, 28 to 45 of 50."""
LATENCY_WITHIN, LATENCY_BETWEEN = 15e-6, 30e-6
"""Seconds of a collective of no bytes."""
HOST = 8e-6
"""Seconds that Python and torch take for one operation that is not compiled."""


@attrs.frozen
class PublishedMachine:
    """A GPU by its data sheet, and shares of it that are reached, which are assumptions.

    An operation takes the time of its FLOPs or that of its bytes, whichever is longer.
    """

    gpu: Gpu
    figures: Figures

    runs_ahead: bool = True

    @property
    def host_seconds(self) -> float:
        """Same as ``Machine.host_seconds``."""
        return HOST

    @property
    def words(self) -> str:
        """Same as ``Machine.words``."""
        return f"published figures of {self.gpu.name}, and the shares of them that runs reach"

    def peak_flops(self, dtype: str) -> float:
        """Same as ``Machine.peak_flops``."""
        return self.gpu.peak_flops

    def seconds(self, work: Work) -> float:
        """Same as ``Machine.seconds``."""
        if work.kind in (*COLLECTIVES, SEND, RECEIVE):
            return link_seconds(work, *published_links(self.figures))
        bytes_seconds = work.size / (self.figures.memory_tb * 1e12 * MEMORY)
        if work.kind == PRODUCT:
            return max(bytes_seconds, work.flops / (self._peak(work.dtype) * PRODUCTS))
        if work.kind == ATTENTION:
            needed = work.flops / 2 if work.form.startswith("causal") else work.flops
            return max(bytes_seconds, needed / (self._peak(work.dtype) * ATTENTIONS))
        return bytes_seconds

    def _peak(self, dtype: str) -> float:
        if dtype.startswith("float8"):
            return 2 * self.gpu.peak_flops
        return self.figures.fp32_tflops * 1e12 if dtype == "float32" else self.gpu.peak_flops


def published_links(figures: Figures) -> tuple[Links, Links]:
    """Within a node, and between nodes."""
    within = Links(LATENCY_WITHIN, figures.within_gb * 1e9 * WITHIN)
    return within, Links(LATENCY_BETWEEN, figures.between_gb * 1e9 * BETWEEN)


def link_seconds(work: Work, within: Links, between: Links) -> float:
    """Of a collective over rings, which is as slow as the slowest of its links.

    In a ring, each rank sends all parts but one, and for a sum over all ranks twice; into a node come the parts of the
    other nodes once, over the cards of all its ranks of the group. In an exchange each rank sends its parts itself.
    """
    if work.kind in (SEND, RECEIVE):
        links = within if work.ranks == work.ranks_of_node else between
        return links.latency + work.size / links.bandwidth
    ranks, here = work.ranks, max(1, work.ranks_of_node)
    size = work.size * (2 if work.kind == ALL_REDUCE else 1)
    inside = (
        within.latency + size * (min(ranks, here) - 1) / (ranks if work.kind == ALL_TO_ALL else here) / within.bandwidth
    )
    if here >= ranks:
        return inside
    share = (ranks - here) / ranks
    cards = 1 if work.kind == ALL_TO_ALL else here
    return max(inside, between.latency + size * share / (cards * between.bandwidth))


def published(gpu: Gpu) -> PublishedMachine:
    """The GPU of ``forge plan --gpu``, of whose table each has figures here."""
    return PublishedMachine(gpu, PUBLISHED[gpu.name])
