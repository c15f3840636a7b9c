"""Display of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forge_core.config.describe import printable
from forge_core.contracts.callback import Callback, RunContext, StepContext


class Console(Callback):
    """Prints lines on rank 0, and hands every line to ``record`` (the log file)."""

    def __init__(self, *, speaks: bool, record: Callable[[str], None]) -> None:
        self._speaks = speaks
        self._record = record
        self._terminal = RichConsole(highlight=False, soft_wrap=True)

    def line(self, text: str, on_a_terminal: str | None = None) -> None:
        if not self._speaks:
            return
        self._record(printable(text))
        if self._terminal.is_terminal:
            self._terminal.print(printable(on_a_terminal or text), markup=False)
        else:
            print(printable(text), flush=True)

    def progress(self) -> list[Callback]:
        """The progress bar, where there is a terminal to draw it on."""
        return [ProgressBar(self._terminal)] if self._speaks and self._terminal.is_terminal else []

    def step_logged(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        parts = [
            f"step {step}/{run.total_steps}",
            f"loss {metrics['loss']:.4f}" if metrics.get("targets", 1) else "no targets to learn from",
            f"grad_norm {metrics['grad_norm']:.3f}",
            f"lr {metrics['lr']:.2e}",
            f"{metrics['tokens_per_second']:,.0f} tokens/s",
            f"{metrics['step_seconds']:.3f} s/step",
            *([f"loss_scale {metrics['loss_scale']:,.0f}"] if "loss_scale" in metrics else []),
            *([f"mfu {metrics['mfu']:.1%}"] if "mfu" in metrics else []),
            *([f"{metrics['memory_gib']:.1f} GiB"] if "memory_gib" in metrics else []),
        ]
        shown = parts
        while len(shown) > 1 and len("  ".join(shown)) > self._terminal.width:  # the rest is in log.txt
            shown = shown[:-1]
        self.line("  ".join(parts), "  ".join(shown))

    def eval_end(self, run: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        if "eval/loss" in metrics:
            ahead = "  looks ahead: later tokens are seen" if metrics.get("eval/looks_ahead") else ""
            perplexity = metrics.get("eval/perplexity")
            nats = "" if perplexity is None else f" nats a token  perplexity {perplexity:.3f}"
            loss, n_targets = metrics["eval/loss"], metrics["eval/tokens"]
            self.line(f"step {step}  eval/loss {loss:.4f}{nats}  ({n_targets:,.0f} tokens){ahead}")
        for label, values in itertools.groupby(sorted(metrics), lambda key: key.rpartition("/")[0]):
            if label != "eval":
                found = "  ".join(f"{key.rpartition('/')[2]} {metrics[key]:,.6g}" for key in values)
                self.line(f"step {step}  {label}  {found}")


class ProgressBar(Callback):
    """One line at the bottom of the terminal, below the lines that are printed."""

    def __init__(self, terminal: RichConsole) -> None:
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=terminal, transient=True)

    def run_start(self, run: RunContext) -> None:
        self._bar = self._progress.add_task("training", total=run.total_steps)
        self._progress.start()

    def step_end(self, run: RunContext, context: StepContext) -> None:
        self._progress.update(self._bar, completed=context.step)

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._progress.stop()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._progress.stop()
