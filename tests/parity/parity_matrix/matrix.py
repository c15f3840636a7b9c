"""The runs of the matrix, and in what they differ from one process."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch

from parity_matrix.cells import (
    CELLS,
    DROPOUT_FAMILIES,
    EXACT,
    FACTORED_FAMILIES,
    FAMILIES,
    LOOKING_FAMILIES,
    MOE_FAMILIES,
    MUON_FAMILIES,
    PACKED_FAMILIES,
    TRAININGS,
    Cell,
)
from parity_matrix.launch import Launcher, Work
from parity_matrix.probe import digest

VOCABULARIES = (257, 264)
"""256 bytes and the end of a document; and rounded up."""
SUMMED = ("loss", "grad_norm", "eval/loss")
"""Values of a line that are sums of rounded numbers; and so are auxiliary losses."""
COUNTED = ("step", "tokens", "eval/tokens", "lr")
COUNTS_OF_EXPERTS = ("load_violation/", "load_entropy/", "experts_idle/", "dropped/")
OF_SOURCES = ("loss/", "eval/loss/", "tokens/")
"""Of a mixture: losses of each source, and tokens, which are counted."""

Exchange = tuple[str, str]
"""Which family has written a checkpoint, and which one reads it."""
EXCHANGES: tuple[Exchange, ...] = (
    *((writer, reader) for writer in FAMILIES for reader in FAMILIES),
    *(("moe-ep2", reader) for reader in MOE_FAMILIES),
    *((writer, MOE_FAMILIES[0]) for writer in ("moe-ep4", "moe-pp2-ep2")),
    *zip(PACKED_FAMILIES, [*PACKED_FAMILIES[1:], PACKED_FAMILIES[0]], strict=True),
    *zip(MUON_FAMILIES, [*MUON_FAMILIES[1:], MUON_FAMILIES[0]], strict=True),
    *zip(FACTORED_FAMILIES, [*FACTORED_FAMILIES[1:], FACTORED_FAMILIES[0]], strict=True),
    ("factored-tp2", "factored-fsdp2"),
    *zip(LOOKING_FAMILIES, [*LOOKING_FAMILIES[1:], LOOKING_FAMILIES[0]], strict=True),
    *zip(DROPOUT_FAMILIES, [*DROPOUT_FAMILIES[1:], DROPOUT_FAMILIES[0]], strict=True),
    *(("fsdp2-fp8-gathered-ac-full", reader) for reader in ("fsdp2-fp8-gathered-ac-full", "bf16")),
)


class Matrix:
    """Cells, the one process that each is compared with, and checkpoints that go from one layout to another.

    Methods that compare return sentences about what is wrong: none if nothing is.
    """

    def __init__(self, launcher: Launcher, steps: int = 10) -> None:
        """
        Args:
            steps: of each run, before its evaluation.
        """
        self._launcher = launcher
        self._steps = steps
        self._until = [f"train.steps={steps}", f"eval.interval={steps}"]

    def run(
        self, cells: Collection[str], exchanges: Collection[Exchange] = (), trainings: Collection[str] = ()
    ) -> None:
        """Run these cells, exchanges and one-process trainings, and what they are compared with, in one launch."""
        exchanged = [name for pair in exchanges for name in (*pair, _judge(pair[0]))]
        wanted = {*cells, *exchanged} - {"one process"}
        alone_too = {"plain", *trainings, *(CELLS[cell].training for cell in wanted)}
        chosen = {alone(training): Cell(1, [], training) for training in TRAININGS if training in alone_too}
        chosen |= {name: cell for name, cell in CELLS.items() if name in wanted}
        works = [Work(name, cell.ranks, [*settings(cell), *self._until]) for name, cell in chosen.items()]
        references = {(writer, _judge(writer)) for writer, _ in exchanges}
        works += [_exchange(*pair, self._steps) for pair in sorted({*exchanges, *references})]
        self._launcher.launch(works)

    def difference(self, cell: str, key: str) -> float:
        """The largest relative difference of ``key`` to one process, over all lines."""
        return max(abs(line[key] / expected[key] - 1) for line, expected in self._lines(cell) if key in expected)

    def distance(self, training: str) -> float:
        """The largest relative difference of a loss between two trainings of one process: this, and the plain one."""
        pair = (self._launcher.metrics(alone(one)) for one in (training, "plain"))
        return max(abs(one["loss"] / other["loss"] - 1) for one, other in zip(*pair, strict=True) if "loss" in one)

    def problems(self, cell: str) -> list[str]:
        """All that can be wrong with a cell."""
        return [
            *self.curve_problems(cell),
            *self.first_loss_problems(cell),
            *self.rank_problems(cell),
            *self.initial_problems(cell),
            *self.buffer_problems(cell),
            *self.gradient_problems(cell),
            *self.saved_problems(cell),
        ]

    def curve_problems(self, cell: str) -> Iterable[str]:
        """Losses, gradient norms, evaluations and counts of all steps against one process's."""
        for line, expected in self._lines(cell):
            compared = ("auxiliary/", "multi_token_", *OF_SOURCES, *COUNTS_OF_EXPERTS)
            keys = {key for key in expected if key in (*SUMMED, *COUNTED) or key.startswith(compared)}
            if missing := keys - line.keys():
                yield f"step {line['step']} has no {', '.join(sorted(missing))}"
            for key in sorted(keys & line.keys()):
                if not math.isclose(line[key], expected[key], rel_tol=_tolerance(CELLS[cell], key)):
                    yield f"step {line['step']}: {key} is {line[key]!r}, in one process {expected[key]!r}"

    def first_loss_problems(self, cell: str) -> Iterable[str]:
        """A model whose norms or head are zero gives ln V, in every layout."""
        loss = self._launcher.metrics(cell)[0]["loss"]
        if any(abs(loss / math.log(vocabulary) - 1) < 20 * EXACT for vocabulary in VOCABULARIES):
            yield f"the first loss is {loss}, that of a model that tells no token from another"

    def rank_problems(self, cell: str) -> Iterable[str]:
        """Every rank clips by the same norm, bit for bit, and holds the same bits of what it shares with others."""
        first, *others = seen = self._launcher.seen(cell)
        if len(seen) != CELLS[cell].ranks or len(first.gradient_norms) != self._steps:
            yield f"{len(seen)} ranks recorded {len(first.gradient_norms)} gradient norms"
        for rank, other in enumerate(others, start=1):
            for step in (step for step, norm in first.gradient_norms.items() if other.gradient_norms[step] != norm):
                norms = f"{other.gradient_norms[step]} and {first.gradient_norms[step]}"
                yield f"step {step}: ranks {rank} and 0 have the gradient norms {norms}"
        for moment in ("start", "end"):
            for key, digests in _by_key(getattr(one, moment) for one in seen).items():
                if len(digests) > 1:
                    yield f"at the {moment}, ranks differ in {key}"

    def initial_problems(self, cell: str) -> Iterable[str]:
        """The first weights are those of one process, bit for bit."""
        yield from _differences(self._held(cell, "start"), self._held(alone(CELLS[cell].training), "start"))

    def buffer_problems(self, cell: str) -> Iterable[str]:
        """What a model keeps beside its parameters (biases of routers) follows from counts, and so is at the end what
        it is in one process, bit for bit."""
        reference = alone(CELLS[cell].training)
        held = [self._held(name, "end") for name in (cell, reference)]
        parameters = {f"model.{name}" for name in self._launcher.seen(reference)[0].gradients}
        of_optimizer = [key.removeprefix("optimizer.") for key in held[1] if key.startswith("optimizer.")]
        parameters |= {
            f"model.{key.rpartition('.')[0]}" for key in of_optimizer
        }  # those that were frozen at step 1, too
        yield from _differences(
            *(
                {key: bits for key, bits in one.items() if key.startswith("model.") and key not in parameters}
                for one in held
            )
        )

    def gradient_problems(self, cell: str) -> Iterable[str]:
        """Each parameter's gradient at step 1, which the norm of them all says little about if it is a small one.

        By the norm of the difference: of an element that is a sum which nearly cancels, rounding leaves little. That is
        why parameters of one element, such as gates, are compared together.
        """
        expected = self._launcher.seen(alone(CELLS[cell].training))[0].gradients
        held = [one.gradients for one in self._launcher.seen(cell)]
        for name in sorted(expected.keys() ^ {name for gradients in held for name in gradients}):
            yield f"{name} has a gradient in one of the two only"
        for rank, gradients in enumerate(held):
            names = sorted(gradients.keys() & expected.keys())
            numbers = [name for name in names if expected[name].numel() == 1]
            groups = [numbers] if numbers else []
            for group in [*groups, *([name] for name in names if name not in numbers)]:
                found, wanted = (torch.cat([one[name].flatten() for name in group]) for one in (gradients, expected))
                error, norm = (found - wanted).norm().item(), wanted.norm().item()
                if not error <= 10 * CELLS[cell].tolerance * norm:  # adapters begin with gradients of zero
                    said = " and ".join(group)
                    yield f"the gradient of {said} on rank {rank}, of norm {norm:.1e}, is off by {error:.1e}"

    def saved_problems(self, cell: str) -> Iterable[str]:
        """The last checkpoint has what the ranks held, bit for bit; averages that are evaluated are made from it."""
        tensors = self._launcher.saved(cell).items()
        saved = {key: digest(tensor) for key, tensor in tensors if not key.startswith("evaluation.")}
        yield from _differences(saved, self._held(cell, "end"))

    def exchange_problems(self, writer: str, reader: str) -> Iterable[str]:
        """What one layout has written, another holds, bit for bit; and it goes on as one process does."""
        found = self._held(_exchange_name(writer, reader), "start")
        if not any(key.startswith("optimizer.") for key in found):
            yield "no state of the optimizer was read"
        yield from _differences(found, self._held(_run_of(writer), "end"))
        line, expected = (self._launcher.metrics(_exchange_name(writer, end))[-1] for end in (reader, _judge(writer)))
        for key in ("step", "loss", "grad_norm", "tokens"):
            tolerance = max(_tolerance(_cell(family), key) for family in (writer, reader))
            if not math.isclose(line[key], expected[key], rel_tol=tolerance):
                yield f"it went on with {key} = {line[key]!r}, and one process with {expected[key]!r}"

    def _lines(self, cell: str) -> list[tuple[dict[str, float], dict[str, float]]]:
        """Lines of the cell, each with that of one process."""
        lines, expected = self._launcher.metrics(cell), self._launcher.metrics(alone(CELLS[cell].training))
        assert len(lines) == len(expected) == self._steps + 1, "all steps, and an evaluation"
        return list(zip(lines, expected, strict=True))

    def _held(self, name: str, moment: str) -> dict[str, str]:
        """Digests of what all ranks held, by key."""
        by_key = _by_key(getattr(one, moment) for one in self._launcher.seen(name))
        return {key: " and ".join(sorted(digests)) for key, digests in by_key.items()}


def settings(cell: Cell) -> list[str]:
    """All overrides of a cell's run."""
    return [*TRAININGS[cell.training], *cell.layout]


def alone(training: str) -> str:
    """The name of the one-process run."""
    return f"one-process-{training.replace(' ', '-')}"


def _run_of(family: str) -> str:
    return alone("plain") if family == "one process" else family


_FAMILIES = (MOE_FAMILIES, PACKED_FAMILIES, MUON_FAMILIES, FACTORED_FAMILIES, DROPOUT_FAMILIES, LOOKING_FAMILIES)


def _judge(writer: str) -> str:
    """The family of one process that reads what others are compared with."""
    return next(
        (family[0] for family in _FAMILIES if writer in family),
        "one process",
    )


def _cell(family: str) -> Cell:
    return Cell(1, []) if family == "one process" else CELLS[family]


def _exchange(writer: str, reader: str, steps: int) -> Work:
    """One more step, in another layout."""
    cell = _cell(reader)
    more = [*settings(cell), f"train.steps={steps + 1}", "eval.interval=0"]
    return Work(_exchange_name(writer, reader), cell.ranks, more, resumes=_run_of(writer))


def _exchange_name(writer: str, reader: str) -> str:
    return f"{_run_of(writer)}-by-{_run_of(reader)}"


def _tolerance(cell: Cell, key: str) -> float:
    if key in COUNTED or key.startswith(("tokens/", *COUNTS_OF_EXPERTS)):
        return 0
    if key.startswith("auxiliary/") and cell.auxiliary_tolerance:
        return cell.auxiliary_tolerance
    return cell.tolerance if key == "grad_norm" else cell.loss_tolerance


def _by_key(digests: Iterable[dict[str, str]]) -> dict[str, set[str]]:
    by_key: dict[str, set[str]] = {}
    for one in digests:
        for key, value in one.items():
            by_key.setdefault(key, set()).add(value)
    return by_key


def _differences(found: dict[str, str], expected: dict[str, str]) -> Iterable[str]:
    for key in sorted(found.keys() ^ expected.keys()):
        yield f"{key} is {'missing' if key in expected else 'there, and should not be'}"
    for key in sorted(found.keys() & expected.keys()):
        if found[key] != expected[key]:
            yield f"{key} has other bits"
