"""Where the time of a few steps goes: a trace, and a table of kernels."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch forgets to export it
from torch.profiler import ProfilerActivity, profile, schedule

from forge_core.contracts.callback import Callback, RunContext, StepContext
from forge_plugins_monitor.config import ProfileConfig

KINDS = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|::send|::recv",
    "attention": r"attention|flash|fmha|sdpa",
    "matmul": r"gemm|matmul|::(add|ba|baddb)?mm\b|::bmm|grouped_mm|scaled_mm|cutlass|cublas|nvjet|wgrad|dgrad",
    "memory": r"memcpy|memset|copy_|::fill_|::zero_|::cat\b|::clone|::contiguous|::empty|::index_select|::_?to_copy",
}
"""Patterns of the names of operators and kernels, the first that fits counts; all else is "other"."""
_NO_OPERATOR = r"^ProfilerStep|\.py\(\d+\): |^nn\.Module: |^<built-in |^<method "
"""Frames of the record; with ``stacks``, also of Python."""
_ROWS = 30
"""Of the table of operators."""


class Profile(Callback):
    """Records ``steps`` steps from ``start`` on, once a run.

    The directory ``profile`` of the run gets ``steps_<a>_to_<b>_rank_<r>.json.gz``, a trace for Perfetto
    (ui.perfetto.dev) or ``chrome://tracing``, and ``….txt``, the time by kinds of work and by operators: of kernels on
    a GPU, of operators elsewhere, each without what is called within.
    """

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._profiler: profile | None = None
        self._recorded = 0

    def run_start(self, run: RunContext) -> None:
        self._profiler = None

    def step_start(self, run: RunContext, step: int) -> None:
        config = self._config
        if step != config.start - config.warmup or not (config.all_ranks or run.rank == 0):
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the library under it writes lines of its own to the terminal
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.device.type == "cuda" else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=config.warmup, active=config.steps),
            profile_memory=config.memory,
            with_stack=config.stacks,
            acc_events=True,
        )
        self._recorded = 0
        self._profiler.start()

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if self._profiler is None:
            return
        self._recorded += context.step >= self._config.start
        if self._recorded < self._config.steps:
            self._profiler.step()
        else:
            self._finish(run)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._finish(run)

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _finish(self, run: RunContext) -> None:
        """Write what has been recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        profiler.stop()
        if not self._recorded:
            return
        first = self._config.start
        last = first + self._recorded - 1
        name = f"steps_{first}_to_{last}_rank_{run.rank}"
        times = self_times(profiler.key_averages(), on_gpu=run.device.type == "cuda")
        folder = run.run_dir / "profile"
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
            (folder / f"{name}.txt").write_text(table(times, self._recorded), encoding="utf-8")
        except OSError as error:
            run.log(f"profile: cannot write to {folder}: {error.strerror}")
            return
        run.log(f"profile: steps {first} to {last}: {_shares(times)}; {_shown(folder, run)}/{name}.txt")


def self_times(events: Iterable[Any], *, on_gpu: bool) -> dict[str, float]:
    """Seconds by the name of an operator, or of a kernel ``on_gpu``, without what it calls.

    Args:
        events: of ``torch.profiler``'s ``key_averages``.
    """
    times: Counter[str] = Counter()
    for event in events:
        if event.is_user_annotation or re.search(_NO_OPERATOR, event.key):
            continue
        if on_gpu and event.device_type == DeviceType.CUDA:
            times[event.key] += event.self_device_time_total * 1e-6
        elif not on_gpu and event.device_type == DeviceType.CPU:
            times[event.key] += event.self_cpu_time_total * 1e-6
    return {name: seconds for name, seconds in times.items() if seconds > 0}


def kind_of(name: str) -> str:
    """The kind of work that an operator or a kernel does, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind of work, the most first."""
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        sums[kind_of(name)] += seconds
    return dict(sorted(sums.items(), key=lambda one: one[1], reverse=True))


def table(times: Mapping[str, float], steps: int) -> str:
    """Kinds of work and the dearest operators, in milliseconds a step and shares."""
    total = sum(times.values()) or 1.0
    rows = [("kind", "ms a step", "share")]
    rows += [(kind, f"{1e3 * s / steps:.3f}", f"{s / total:.1%}") for kind, s in by_kind(times).items()]
    dearest = sorted(times.items(), key=lambda item: -item[1])[:_ROWS]
    more = [("operator or kernel", "ms a step", "share")]
    more += [(name[:100], f"{1e3 * s / steps:.3f}", f"{s / total:.1%}") for name, s in dearest]
    return "\n\n".join("\n".join(_aligned(part)) for part in (rows, more)) + "\n"


def _aligned(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(row[0]) for row in rows)
    return [f"{name:<{width}}  {time:>10}  {share:>7}" for name, time, share in rows]


def _shares(times: Mapping[str, float]) -> str:
    total = sum(times.values())
    return ", ".join(f"{seconds / total:.0%} {kind}" for kind, seconds in by_kind(times).items()) or "no work"


def _shown(folder: Path, run: RunContext) -> str:
    return str(folder.relative_to(run.run_dir.parent))
