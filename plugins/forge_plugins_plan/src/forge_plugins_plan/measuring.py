"""Measures the machine that it runs on: products, attention, memory, the host, and collectives of its ranks.

Sizes are such that all of it takes about a minute. Data are random: a GPU multiplies zeros faster than anything else.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_plugins_plan.calibration import Calibration, Collective, Grid
from forge_plugins_plan.work import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Recorder


@attrs.frozen
class Sizes:
    """At which a device is measured."""

    rows: tuple[float, ...]
    """m of a product."""
    widths: tuple[float, ...]
    """n and k of it."""
    queries: tuple[float, ...]
    heads: tuple[float, ...]
    """Widths of a head."""
    bytes_moved: tuple[float, ...]
    bytes_sent: tuple[float, ...]


OF_CPU = Sizes(
    rows=(64, 256, 1024, 2048),
    widths=(32, 64, 256, 512),
    queries=(64, 256, 1024),
    heads=(32, 64, 128),
    bytes_moved=(2**14, 2**18, 2**21, 2**24, 2**26),
    bytes_sent=(2**10, 2**14, 2**18, 2**21, 2**24),
)
OF_GPU = Sizes(
    rows=(256, 2048, 8192, 32_768),
    widths=(256, 1024, 4096, 16_384),
    queries=(512, 2048, 8192),
    heads=(64, 128, 256),
    bytes_moved=(2**16, 2**20, 2**24, 2**28, 2**31),
    bytes_sent=(2**12, 2**18, 2**22, 2**26, 2**30),
)
_DTYPES = (torch.float32, torch.bfloat16)
_TIMES = 15
"""Measurements, of which the median counts: what a run finds, too, on a machine that others use."""
_AT_LEAST = 0.001
"""Seconds of each."""
_KEPT = 2**28
"""Bytes of results that a measurement keeps at most."""


def measure(device: torch.device, sizes: Sizes | None = None) -> Calibration:
    """Measure ``device``, together with the ranks of the process group if there is one, which all have to call this.

    Each rank returns what it has measured itself.

    Args:
        sizes: for tests; by default those of the kind of device.
    """
    sizes = sizes or (OF_CPU if device.type == "cpu" else OF_GPU)
    timer = _Timer(device)
    return Calibration(
        device=device_words(device),
        torch=torch.__version__,
        date=date.today().isoformat(),
        host=platform.node(),
        ranks=_ranks_of_node(),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        host_seconds=_host_seconds(device),
        products=dict(_products(timer, sizes)),
        attention=dict(_attention(timer, sizes)),
        memory=dict(_memory(timer, sizes)),
        collectives=tuple(_collectives(timer, sizes)),
    )


def device_words(device: torch.device) -> str:
    """``cuda`` or ``cpu`` and its name."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{device.type} {names[0] if names else platform.processor() or platform.machine()}"


@attrs.frozen
class _Timer:
    device: torch.device

    def seconds(self, do: Callable[..., object], *given: object) -> float:
        """Of one ``do(*given)``."""
        first = do(*given)  # memory, kernels that are chosen
        size = first.nbytes if isinstance(first, torch.Tensor) else 0
        most = _KEPT // size if size else 1000
        times = max(1, min(1000, most, int(_AT_LEAST / max(1e-7, self.once(1, do, *given)))))
        return median(self.once(times, do, *given) for _ in range(_TIMES))

    def once(self, times: int, do: Callable[..., object], *given: object) -> float:
        """Mean seconds of ``do``. Its results are kept meanwhile, as a step keeps what it makes: a CPU finds the memory
        for the next one in no cache."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            _kept = [do(*given) for _ in range(times)]
            return (time.perf_counter() - start) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(times):
            do(*given)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


def _products(timer: _Timer, sizes: Sizes) -> Iterator[tuple[str, Grid]]:
    """Of a forward, and of the gradient of its weight, which reads its first factor across."""
    for dtype in _DTYPES:
        straight, across = [], []
        for m, n, k in product(map(int, sizes.rows), *[[*map(int, sizes.widths)]] * 2):
            rows, weight, gradient = (timer.random(*shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))
            flops = 2 * m * n * k
            straight.append(flops / timer.seconds(torch.matmul, rows, weight.t()))
            across.append(flops / timer.seconds(torch.matmul, gradient.t(), rows))
        axes = (sizes.rows, sizes.widths, sizes.widths)
        yield f"{_name(dtype)}, straight", Grid(axes, tuple(straight))
        yield f"{_name(dtype)}, across", Grid(axes, tuple(across))


def _attention(timer: _Timer, sizes: Sizes) -> Iterator[tuple[str, Grid]]:
    for dtype, causal in product(_DTYPES, (False, True)):
        rates: dict[str, list[float]] = {"": [], ", backward": []}
        for queries, width in product(map(int, sizes.queries), map(int, sizes.heads)):
            heads = max(1, int(sizes.queries[-1] // queries))
            inputs = [timer.random(1, heads, queries, width, dtype=dtype).requires_grad_() for _ in range(3)]
            attend = partial(F.scaled_dot_product_attention, is_causal=causal)
            output = attend(*inputs)  # type: ignore[arg-type]  # the keyword is bound
            back = partial(torch.autograd.grad, output, inputs, torch.randn_like(output), retain_graph=True)
            flops = 4 * heads * queries**2 * width
            with torch.no_grad():
                rates[""].append(flops / timer.seconds(attend, *inputs))
            rates[", backward"].append(2.5 * flops / timer.seconds(back))
        for which, found in rates.items():
            yield (
                f"{_name(dtype)}, {'causal' if causal else 'whole'}{which}",
                Grid((sizes.queries, sizes.heads), tuple(found)),
            )


def _memory(timer: _Timer, sizes: Sizes) -> Iterator[tuple[str, Grid]]:
    """Rates by what is read and written, of a typical operation of each form."""
    for dtype in _DTYPES:
        rates: dict[str, list[float]] = {"plain": [], "math": [], "strided": [], "index": []}
        for size in map(int, sizes.bytes_moved):
            elements = max(1024, size // 3 // dtype.itemsize // 256 * 256)
            one, other = (timer.random(elements, dtype=dtype) for _ in range(2))
            table = one.view(-1, 256)
            rows = torch.randperm(len(table), device=timer.device)
            rates["plain"].append(3 * one.nbytes / timer.seconds(torch.add, one, other))
            rates["math"].append(2 * one.nbytes / timer.seconds(F.silu, one))
            rates["strided"].append(2 * one.nbytes / timer.seconds(torch.Tensor.contiguous, table.t()))
            rates["index"].append(2 * one.nbytes / timer.seconds(torch.index_select, table, 0, rows))
        for form, found in rates.items():
            yield f"{_name(dtype)}, {form}", Grid((sizes.bytes_moved,), tuple(found))


def _host_seconds(device: torch.device) -> float:
    """What Python, autograd and torch take for an operation: of layers too small to take any time else."""
    layer = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(32))).to(device)
    rows = torch.ones(2, 4, device=device)

    def step() -> None:
        layer(rows).sum().backward()

    counter = _Counter()
    with counter:
        step()
    typical = median(_wall(step) for _ in range(20))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return typical / counter.operations


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts what a ``Recorder`` would charge."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.operations = 0
        self._recorder = Recorder(1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        result = func(*args, **(kwargs or {}))
        self.operations += len([*self._recorder.works(func, args, kwargs or {}, result, "activations")])
        return result


def _wall(do: Callable[[], None]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def _collectives(timer: _Timer, sizes: Sizes) -> Iterator[Collective]:
    """Of groups of 2, 4, 8 … ranks of a node, and of all ranks if they are of several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    world, of_node = dist.get_world_size(), _ranks_of_node()
    groups = {ranks for ranks in (2**power for power in range(1, 11)) if ranks <= of_node} | {of_node, world}
    for ranks in sorted(groups - {1}):
        if world % ranks:
            continue
        members = [[*range(first, first + ranks)] for first in range(0, world, ranks)]
        own, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]  # torch's
        seconds: dict[str, list[float]] = {}
        for size in map(int, sizes.bytes_sent):
            for kind, do in _exchanges(timer.device, own, ranks, size):
                seconds.setdefault(kind, []).append(_together(timer, do, own))
        for kind, found in seconds.items():
            grid = Grid((sizes.bytes_sent,), tuple(found))
            yield Collective(kind=kind, ranks=ranks, ranks_of_node=min(ranks, of_node), seconds=grid)


def _exchanges(
    device: torch.device, group: dist.ProcessGroup, ranks: int, size: int
) -> Sequence[tuple[str, Callable[[], object]]]:
    """Each collective of ``size`` bytes."""
    whole = torch.randn(max(1, size // 4 // ranks) * ranks, device=device)
    part, other = whole[: len(whole) // ranks].clone(), torch.empty_like(whole)
    return [
        (ALL_GATHER, lambda: dist.all_gather_into_tensor(other, part, group=group)),
        (REDUCE_SCATTER, lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
        (ALL_REDUCE, lambda: dist.all_reduce(other, group=group)),
        (ALL_TO_ALL, lambda: dist.all_to_all_single(other, whole, group=group)),
    ]


def _together(timer: _Timer, do: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Seconds of a collective, which all ranks repeat equally often."""
    do()
    times = []
    for _ in range(_TIMES):
        dist.barrier(group=group)
        times.append(timer.once(4, do))
    return median(times)


def _ranks_of_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if dist.is_initialized() else 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
