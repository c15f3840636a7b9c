"""The layer ``moe`` against one that pads, and what its metrics cost; with ``--gpu``, whole steps of a 9.2B model.

On the CPU (``python benchmarks/moe.py``, three minutes): forward and backward of a sparse layer (dim 256, experts of
512, 2048 tokens, two experts a token, bf16) against the same layer with its experts padded to the busiest one, and
against a dense layer of as many active parameters; freed memory is kept, as ``forge run`` does on a CPU. Two layers
pad: one expert by expert, as the reference system does, to which the goal is; and one as fast as we could make it. Each
round has other tokens, as steps have, so that experts have other loads: of tokens that have nothing in common, and are
spread evenly, and of tokens that have, and are not, as in a run before its router is balanced. Contestants take turns,
so that all of them meet the same load of the machine, and times are those of the CPU, not of the clock. oneDNN prepares
a product for each number of rows that it meets for the first time. In the columns "at first" it meets them, as in the
first steps of a run; all others are of tokens that were there before. Then the part of the time of sparse layers that
goes into metrics, at an interval of 10 steps.

On a GPU (``python benchmarks/moe.py --gpu [OVERRIDES]``): tokens a second of ``configs/model/moe_small.toml``, 9.2B
parameters of which 2.6B are multiplied with a token, and of the dense model of equal active parameters, measured as
``train_gpu.py`` does, in pure bf16, as states in fp32 take more than a GPU has. To see that it works without one:
``python benchmarks/moe.py --gpu --device cpu --warmup 1 --steps 1 train.seq_len=64 train.batch_size=1 model.dim=64
model.n_layers=2 parallel.passes.compile=false``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import train_gpu
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.run.process import keep_freed_memory
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_dense.config import MLPConfig
from forge_plugins_dense.feed_forward import MLP
from forge_plugins_moe import feed_forward
from forge_plugins_moe.experts import Experts
from forge_plugins_moe.routers.gated_router import GatedRouter

DIM, HIDDEN, TOKENS, TOP_K = 256, 512, 2048, 2
GOALS = {8: 1.4, 64: 1.8}
"""By experts: how many times faster than with padding."""
BLOCKS, INTERVAL = 2, 10
"""Of the steps whose metrics are measured."""
BATCHES = 32
COMMON = {"even": 0.0, "uneven": 0.25}
"""How large, next to what is a token's own, is what all have in common."""
RECOMPUTE = ("none", "full")

Step = Callable[[int], torch.Tensor]
"""Given the round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="On the CPU.")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--config", type=Path, default=train_gpu.MODELS / "moe_small.toml", help="With --gpu.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="With --gpu.")
    parser.add_argument("--warmup", type=int, default=5, help="With --gpu: steps that are not measured.")
    parser.add_argument("--steps", type=int, default=20, help="With --gpu: steps that are.")
    parser.add_argument("overrides", nargs="*", help="With --gpu, of the jobs: train.batch_size=2.")
    options = parser.parse_args()
    if options.gpu:
        whole_steps(options)
        return
    keep_freed_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; CPU ms, median of {options.rounds} rounds\n")
    compare_layers(options.rounds)
    print()
    cost_of_metrics(options.rounds)


def compare_layers(rounds: int) -> None:
    print(
        "| experts | tokens | busiest / mean | one by one | padded | moe | dense | one by one / moe | goal "
        "| padded / moe | moe / dense | at first: one by one / moe | at first: padded / moe | largest difference |"
    )
    print("|---" * 14 + "|")
    for (n_experts, goal), (name, common) in itertools.product(GOALS.items(), COMMON.items()):
        layer, padded, one_by_one = (sparse_layer(n_experts) for _ in range(3))
        padded.experts.forward = Padded(padded.experts)
        one_by_one.experts.forward = PaddedOneByOne(one_by_one.experts)
        steps = [forward_and_backward(one, common) for one in (one_by_one, padded, layer, dense_layer())]
        *others, found, _ = (step(0).float() for step in steps)
        error = max(((found - other).abs().max() / other.abs().max()).item() for other in others)
        at_first = take_turns(steps, BATCHES)
        times = take_turns(steps, rounds)
        violation = statistics.median(busiest_to_mean(layer, steps[2], turn) for turn in range(BATCHES))
        medians = " | ".join(f"{statistics.median(one):.1f}" for one in times)
        (first_reference, first_padded, first_moe, _), (reference, best, moe, dense) = at_first, times
        print(
            f"| {n_experts} | {name} | {violation:.2f} | {medians} | {ratio(reference, moe):.2f} | {goal} | "
            f"{ratio(best, moe):.2f} | {ratio(moe, dense):.2f} | {ratio(first_reference, first_moe):.2f} | "
            f"{ratio(first_padded, first_moe):.2f} | {error:.1e} |"
        )


def busiest_to_mean(layer: feed_forward.MoE, step: Step, turn: int) -> float:
    """Of the rows of experts in one round: to how much more padding comes."""
    layer.load.zero_()
    step(turn)
    return (layer.load.max() / layer.load.mean()).item()


def ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


class Padded:
    """In place of ``Experts.forward``: every expert is given as many rows as the busiest one has, zeros if need be, for
    which the host waits."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    def __call__(self, hidden: torch.Tensor, assignments: feed_forward.Assignments, _: None = None) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        order = assignments.expert.argsort(stable=True)
        counts = assignments.expert.bincount(minlength=self.experts.n_experts).tolist()
        token = assignments.token[order]
        rows = self.multiply(tokens[token], counts)
        return self.combine(rows, assignments.weight[order], token, len(tokens)).view_as(hidden)

    def multiply(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        padded = pad_sequence(rows.split(counts), batch_first=True)  # (E, max, D)
        gate, up, down = (stack.mT for stack in self.stacks())
        products = (F.silu(padded.bmm(gate)) * padded.bmm(up)).bmm(down)
        return torch.cat([one[:count] for one, count in zip(products, counts, strict=True)])

    def combine(self, rows: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, n_tokens: int) -> torch.Tensor:
        return torch.zeros(n_tokens, rows.shape[1]).index_add(0, token, rows * weight[:, None]).to(rows.dtype)

    def stacks(self) -> tuple[torch.Tensor, ...]:
        return self.experts.gate, self.experts.up, self.experts.down


class PaddedOneByOne(Padded):
    """As the reference system pads: rows are copied expert by expert into zeros, and out of what comes of them; stacks
    are ``(E, in, out)``, products those of ``grouped_mm``, and tokens are summed in bf16."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        for stack in self.stacks():
            stack.data = stack.data.mT.contiguous()

    def multiply(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        padded = rows.new_zeros(len(counts), max(counts), rows.shape[1])
        output = torch.zeros_like(rows)
        parts = [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        for expert, part in enumerate(parts):
            padded[expert, : counts[expert]] = rows[part]
        gate, up, down = self.stacks()
        products = F.grouped_mm(F.silu(F.grouped_mm(padded, gate)) * F.grouped_mm(padded, up), down)
        for expert, part in enumerate(parts):
            output[part] = products[expert, : counts[expert]]
        return output

    def combine(self, rows: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, n_tokens: int) -> torch.Tensor:
        weighted = rows * weight[:, None].to(rows.dtype)
        return rows.new_zeros(n_tokens, rows.shape[1]).scatter_add(0, token[:, None].expand_as(weighted), weighted)


def cost_of_metrics(rounds: int) -> None:
    """Of what the layer and its router count in each step, and report in every tenth."""
    blocks = [sparse_layer(8) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    step = forward_and_backward(model)

    def steps(with_metrics: bool) -> Step:
        def some(turn: int) -> torch.Tensor:
            for number in range(INTERVAL):
                output = step(turn * INTERVAL + number)
                if not with_metrics:
                    continue
                for module in model.modules():
                    if hasattr(module, "step_metrics"):
                        accumulated = {name: tensor.clone() for name, tensor in module.accumulators().items()}
                        module.before_optimizer_step(accumulated, 0.5)
                        for tensor in module.accumulators().values():
                            tensor.zero_()
                        if number == 0:
                            torch.stack([*module.step_metrics().values()]).tolist()
            return output

        return some

    def without(turn: int) -> torch.Tensor:
        with nothing_is_counted():
            return steps(False)(turn)

    measured = take_turns([steps(True), without], rounds)
    counting, silent = (statistics.median(one) / INTERVAL for one in measured)
    part = ratio(*measured) - 1
    print(f"metrics: {counting:.2f} ms a step, {silent:.2f} without, {part:+.1%} (allowed: 2 %)")


@contextmanager
def nothing_is_counted():
    """Of what is only reported: the balance loss goes on counting."""
    nothing = torch.zeros(())
    with (
        mock.patch.object(GatedRouter, "measure", lambda self, weight, *_: weight),
        mock.patch.object(feed_forward, "count_by_expert", return_value=nothing),
        mock.patch.object(feed_forward, "accumulate", lambda activation, *_: activation),
    ):
        yield


def sparse_layer(n_experts: int) -> feed_forward.MoE:
    build = ComponentBuilder(discover())
    table = {
        "name": "moe",
        "n_experts": n_experts,
        "hidden_dim": HIDDEN,
        "router": {"name": "softmax_topk", "top_k": TOP_K},
    }
    layer = build(build.resolve("feed_forward", table), dim=DIM, layer=0, n_layers=1)
    layer.init_weights(SeededInitializer(0), "", 0.02, 0.02)
    for parameter in layer.parameters():  # not buffers, which count
        parameter.data = parameter.data.bfloat16()
    return layer


def dense_layer() -> MLP:
    layer = MLP(MLPConfig(hidden_dim=TOP_K * HIDDEN), dim=DIM, build=ComponentBuilder(discover()))
    layer.init_weights(SeededInitializer(0), "", 0.02, 0.02)
    return layer.to(torch.bfloat16)


def forward_and_backward(layer: nn.Module, common: float = 0.0) -> Step:
    generator = torch.Generator().manual_seed(1)
    shared = common * torch.randn(DIM, generator=generator)
    batches = [
        (torch.randn(4, TOKENS // 4, DIM, generator=generator) + shared).bfloat16().requires_grad_()
        for _ in range(BATCHES)
    ]

    def step(turn: int) -> torch.Tensor:
        hidden = batches[turn % BATCHES]
        output = layer(hidden)
        output.square().sum().backward()
        hidden.grad = None
        layer.zero_grad(set_to_none=True)
        return output.detach()

    return step


def take_turns(steps: list[Step], rounds: int) -> list[list[float]]:
    """CPU milliseconds of each."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 2):
        for step, measured in zip(steps, times, strict=True):
            begun = time.process_time()
            step(number)
            if number >= 2:
                measured.append((time.process_time() - begun) * 1e3)
    return times


def whole_steps(options: argparse.Namespace) -> None:
    """A table as that of ``train_gpu.py``."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("moe.py --gpu measures a CUDA GPU, and torch sees none here; try it out with --device cpu")
    with options.config.open("rb") as file:
        layer = tomllib.load(file)["model"]["feed_forward"]
    models: Mapping[str, list[str]] = {options.config.stem: [], "dense": as_dense(layer)}
    steps = f"median of {options.steps} steps after {options.warmup}"
    print(f"{train_gpu.name_of(options.device)}, torch {torch.__version__}; {steps}\n")
    print(f"| {' | '.join(train_gpu.COLUMNS)} |\n{'|---' * len(train_gpu.COLUMNS)}|", flush=True)
    precision = "bf16_pure" if options.device == "cuda" else "fp32"
    overrides = options.overrides
    for name, own in models.items():
        for recompute in RECOMPUTE:
            options.overrides = [*own, *overrides]
            cells = train_gpu.measure_case(options.config, precision, recompute, options)
            print(f"| {' | '.join([name, precision, recompute, *cells])} |", flush=True)


def as_dense(layer: Mapping) -> list[str]:
    """Overrides that make a model dense whose layers are as wide as the experts of a token together."""
    if layer.get("every", 1) == 1 and "hidden_dim" not in layer:
        width = layer["router"]["top_k"] * layer["dense"]["hidden_dim"]
        return ["model.num_experts=0", f"model.feed_forward.dense.hidden_dim={width}"]
    raise SystemExit(f"no one width makes all layers of this model dense: {layer}")


if __name__ == "__main__":
    main()
