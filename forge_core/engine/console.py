"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forge_core.contracts.callback import Callback, RunContext, StepContext


class Console(Callback):
    """Prints lines and progress on the first rank, and hands every line to ``record`` (the log file)."""

    def __init__(self, *, speaks: bool, record: Callable[[str], None]) -> None:
        self._speaks = speaks
        self._record = record
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None

    def line(self, text: str) -> None:
        if not self._speaks:
            return
        self._record(text)
        if self._progress is not None:
            self._progress.console.print(text, markup=False)
        else:
            print(text, flush=True)

    def run_start(self, run: RunContext) -> None:
        if not (self._speaks and sys.stdout.isatty()):
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._rich,
            transient=True,
        )
        self._bar = self._progress.add_task("training", total=run.total_steps)
        self._progress.start()

    def step_end(self, run: RunContext, context: StepContext) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, completed=context.step)

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        parts = [
            f"step {step}/{run.total_steps}",
            f"loss {metrics['loss']:.4f}",
            f"grad_norm {metrics['grad_norm']:.3f}",
            f"lr {metrics['lr']:.2e}",
            f"{metrics['tokens_per_second']:,.0f} tokens/s",
            f"{metrics['step_seconds']:.3f} s/step",
        ]
        if "mfu" in metrics:
            parts.append(f"mfu {metrics['mfu']:.1%}")
        if "memory_gib" in metrics:
            parts.append(f"{metrics['memory_gib']:.1f} GiB")
        self.line("  ".join(parts))

    def eval_end(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        self.line(
            f"step {step}  eval/loss {metrics['eval/loss']:.4f} nats a token  "
            f"perplexity {metrics['eval/perplexity']:.3f}  ({metrics['eval/tokens']:,.0f} tokens)"
        )

    def run_end(self, run: RunContext, step: int) -> None:
        self._stop()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
