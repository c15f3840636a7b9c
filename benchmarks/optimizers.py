"""A step of each optimizer against a straightforward implementation that goes from tensor to tensor.

    OMP_NUM_THREADS=2 python benchmarks/optimizers.py [--layers 4] [--dim 256] [--rounds 15] [--steps 3] [--only sgd]

The parameters are those of a decoder with gated feed-forward layers three times as wide as the model. In each round
both implementations step in turn, and their processor time is counted, so that ratios within one run mean something on
a machine that others use; a time is the median over rounds. Split weights are in bf16, what they are compared with in
fp32. "bytes" are those of a parameter and its state in ours. The lines with "clip" clip gradients by a factor, in the
step and in a pass before it. The last line is the Newton–Schulz iteration of one matrix alone.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from forge_core.contracts.optimizer import NamedParameter
from forge_plugins_optim.adafactor import Adafactor
from forge_plugins_optim.adamw import adamw
from forge_plugins_optim.adamw_8bit import AdamW8bit
from forge_plugins_optim.config import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeAdamWConfig,
    SGDConfig,
)
from forge_plugins_optim.lion import Lion
from forge_plugins_optim.muon import Muon
from forge_plugins_optim.newton_schulz import COEFFICIENTS, orthogonalise
from forge_plugins_optim.schedule_free import ScheduleFreeAdamW
from forge_plugins_optim.sgd import SGD

VOCABULARY = 257


def main() -> None:
    arguments = _arguments()
    print(
        f"{arguments.layers} layers of width {arguments.dim}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    print(f"{'optimizer':<30}{'ours ms':>10}{'plain ms':>10}{'ratio':>8}{'bytes':>8}")
    for name, make_pair in _pairs(arguments).items():
        if arguments.only not in name:
            continue
        pair = make_pair()
        ours, plain = _alternating(pair, arguments.rounds, arguments.steps)
        print(f"{name:<30}{ours:>10.2f}{plain:>10.2f}{plain / ours:>8.1f}{_kept(pair[0]):>8}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="optimizers against plain ones")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a name")
    return parser.parse_args()


Pair = tuple[Callable[[], object], Callable[[], object]]


def _pairs(arguments: argparse.Namespace) -> Mapping[str, Callable[[], Pair]]:
    make = partial(_parameters, arguments.layers, arguments.dim)
    in_bf16 = partial(make, torch.bfloat16)
    lion, sgd, free = (partial(one, lr=1e-3) for one in (LionConfig, SGDConfig, ScheduleFreeAdamWConfig))
    split = partial(AdamWConfig, lr=1e-3, rounding="split")
    matrix = torch.randn(3 * arguments.dim, arguments.dim)
    return {
        "adamw": lambda: (_ours(adamw, AdamWConfig(lr=1e-3), make()), _plain_adamw(make())),
        "adamw, split": lambda: (_ours(adamw, split(), in_bf16()), _plain_adamw(make())),
        "adamw, split, compiled": lambda: (_ours(adamw, split(compile=True), in_bf16()), _plain_adamw(make())),
        "adamw, split, bf16": lambda: (_ours(adamw, split(moments="bf16"), in_bf16()), _plain_adamw(make())),
        "adamw, clip": lambda: _clipping(adamw, AdamWConfig(lr=1e-3), make),
        "adamw, split, compiled, clip": lambda: _clipping(adamw, split(compile=True), in_bf16),
        "lion": lambda: (_ours(Lion, lion(), make()), partial(_plain_lion, make(), {})),
        "lion, compiled": lambda: (_ours(Lion, lion(compile=True), make()), partial(_plain_lion, make(), {})),
        "sgd": lambda: (_ours(SGD, sgd(), make()), partial(_plain_sgd, make(), {})),
        "sgd, compiled": lambda: (_ours(SGD, sgd(compile=True), make()), partial(_plain_sgd, make(), {})),
        "muon, fp32, not tall": lambda: (_muon("bf16", make()), partial(_plain_muon, _matrices(make()), {})),
        "muon, torch.optim": lambda: (_muon("bf16", make()), torch.optim.Muon(_matrices(make()), 1e-3).step),
        "schedule_free, the paper": lambda: (
            _ours(ScheduleFreeAdamW, free(), make()),
            partial(_plain_schedule_free, make(), {}),
        ),
        "schedule_free, compiled": lambda: (
            _ours(ScheduleFreeAdamW, free(compile=True), make()),
            partial(_plain_schedule_free, make(), {}),
        ),
        "schedule_free, authors'": lambda: (
            _ours(ScheduleFreeAdamW, free(), make()),
            _published_schedule_free(make()),
        ),
        "adafactor": lambda: (_ours(Adafactor, AdafactorConfig(lr=1e-3), make()), _plain_adafactor(make())),
        "adamw_8bit": lambda: (_ours(AdamW8bit, AdamW8bitConfig(lr=1e-3), make()), _plain_adamw(make())),
        "newton_schulz": lambda: (
            lambda: orthogonalise(matrix.bfloat16().unsqueeze(0), 5),
            lambda: _plain_newton_schulz(matrix),
        ),
    }


def _alternating(pair: Pair, rounds: int, steps: int) -> list[float]:
    """Milliseconds of one call of each."""
    times: list[list[float]] = [[] for _ in pair]
    for step in pair:
        step()
    for number in range(rounds):
        in_order = [*zip(pair, times, strict=True)]
        for step, of_step in in_order if number % 2 else reversed(in_order):
            start = time.process_time()
            for _ in range(steps):
                step()
            of_step.append((time.process_time() - start) / steps * 1e3)
    return [statistics.median(of_step) for of_step in times]


def _kept(step: Callable[[], object]) -> str:
    """Bytes of a parameter and its state, for each element."""
    optimizer = getattr(step, "__self__", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return ""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    states = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    return f"{sum(one.nbytes for one in (*parameters, *states)) / sum(one.numel() for one in parameters):.2f}"


def _parameters(layers: int, dim: int, dtype: torch.dtype = torch.float32) -> list[NamedParameter]:
    shapes = {"embed.weight": ("embedding", (VOCABULARY, dim)), "norm.weight": ("norm", (dim,))}
    shapes["head.weight"] = ("head", (VOCABULARY, dim))
    for layer in range(layers):
        for name in "qkvo":
            shapes[f"blocks.{layer}.attention.{name}.weight"] = ("matrix", (dim, dim))
        for name, shape in (("gate", (3 * dim, dim)), ("up", (3 * dim, dim)), ("down", (dim, 3 * dim))):
            shapes[f"blocks.{layer}.feed_forward.{name}.weight"] = ("matrix", shape)
        for name in ("attention_norm", "feed_forward_norm"):
            shapes[f"blocks.{layer}.{name}.weight"] = ("norm", (dim,))
    made = [
        NamedParameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)), role)
        for name, (role, shape) in shapes.items()
    ]
    for one in made:
        one.parameter.grad = torch.randn_like(one.parameter)
    return made


def _matrices(parameters: list[NamedParameter]) -> list[nn.Parameter]:
    return [one.parameter for one in parameters if one.role == "matrix"]


def _ours(factory, config, parameters):
    return factory(config, parameters=parameters).step


def _clipping(factory, config, make) -> Pair:
    (in_step, _), (before, parameters) = ((factory(config, parameters=own), own) for own in (make(), make()))
    gradients = [one.parameter.grad for one in parameters]
    scale = torch.tensor(0.999)
    in_step.gradient_scale = scale

    def clip_and_step() -> None:
        torch._foreach_mul_(gradients, scale)
        before.step()

    return in_step.step, clip_and_step


def _muon(dtype, parameters):
    return _ours(Muon, MuonConfig(lr=1e-3, dtype=dtype), [one for one in parameters if one.role == "matrix"])


def _plain_adamw(parameters):
    return torch.optim.AdamW([one.parameter for one in parameters], lr=1e-3, fused=False, foreach=False).step


def _published_schedule_free(parameters):
    """The authors' package, from tensor to tensor. It forms no average of its own, and keeps z in place."""
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree([one.parameter for one in parameters], lr=1e-3, weight_decay=0.1, foreach=False)
    optimizer.train()
    return optimizer.step


def _plain_adafactor(parameters):
    """That of transformers."""
    from transformers import Adafactor as Published

    parameters = [one.parameter for one in parameters]
    return Published(parameters, lr=1e-3, scale_parameter=False, relative_step=False).step


@torch.no_grad()
def _plain_lion(parameters, momenta) -> None:
    for one in parameters:
        parameter, gradient = one.parameter, one.parameter.grad
        momentum = (
            momenta[one.name] if one.name in momenta else momenta.setdefault(one.name, torch.zeros_like(parameter))
        )
        parameter.mul_(1 - 1e-3 * 0.1)
        update = (0.9 * momentum + (1 - 0.9) * gradient).sign()
        parameter.add_(update, alpha=-1e-3)
        momentum.mul_(0.99).add_(gradient, alpha=1 - 0.99)


@torch.no_grad()
def _plain_sgd(parameters, momenta) -> None:
    for one in parameters:
        parameter, gradient = one.parameter, one.parameter.grad
        momentum = (
            momenta[one.name] if one.name in momenta else momenta.setdefault(one.name, torch.zeros_like(parameter))
        )
        parameter.mul_(1 - 1e-3 * 0.1)
        momentum.mul_(0.9).add_(gradient)
        parameter.add_(momentum, alpha=-1e-3)


@torch.no_grad()
def _plain_schedule_free(parameters, states) -> None:
    """Algorithm 1 of Defazio et al. (2024), line by line: x and z are kept, and y is where gradients are taken."""
    lr, beta1, beta2, eps, decay = 1e-3, 0.9, 0.999, 1e-8, 0.1
    step = states["step"] = states.get("step", 0) + 1
    for one in parameters:
        y, gradient = one.parameter, one.parameter.grad
        if one.name not in states:
            states[one.name] = [y.clone(), y.clone(), torch.zeros_like(y)]
        x, z, square = states[one.name]
        square = beta2 * square + (1 - beta2) * gradient**2
        z = z - lr * (gradient / ((square / (1 - beta2**step)).sqrt() + eps) + decay * y)
        x = (1 - 1 / step) * x + z / step
        y.copy_((1 - beta1) * z + beta1 * x)
        states[one.name] = [x, z, square]


@torch.no_grad()
def _plain_muon(parameters, momenta) -> None:
    for parameter in parameters:
        momentum = (
            momenta[parameter] if parameter in momenta else momenta.setdefault(parameter, torch.zeros_like(parameter))
        )
        momentum.mul_(0.95).add_(parameter.grad)
        update = _plain_newton_schulz(momentum)
        parameter.mul_(1 - 1e-3 * 0.1)
        parameter.add_(update, alpha=-1e-3 * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5)


def _plain_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """In fp32, tall matrices as they are."""
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


if __name__ == "__main__":
    main()
