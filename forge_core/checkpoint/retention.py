"""At which steps a checkpoint is written, and which are kept: pure functions of what there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forge_core.config.sections import CheckpointSection


def is_due(step: int, section: CheckpointSection) -> bool:
    """Return whether the section has a checkpoint written after ``step`` (0: before the first). It does not know of the
    run's end, nor of ``checkpoint.minutes``."""
    return (step > 0 and section.interval > 0 and step % section.interval == 0) or _is_power_of_two(step, section)


def _is_power_of_two(step: int, section: CheckpointSection) -> bool:
    """The start of the window, and every power of two after it, up to its end."""
    after = step - section.powers_of_two_from
    in_window = after >= 0 and step <= section.powers_of_two_until
    return section.powers_of_two_until > 0 and in_window and after & (after - 1) == 0


def superfluous(checkpoints: Sequence[tuple[int, Mapping[str, float]]], section: CheckpointSection) -> list[int]:
    """The steps of the checkpoints that may go.

    Args:
        checkpoints: step and evaluation values of each that is whole, in any order.

    Returns:
        Steps in ascending order; none while ``keep_last`` is not set. The newest never goes.
    """
    return [step for step, reasons in reasons_to_keep(checkpoints, section).items() if not reasons]


def reasons_to_keep(
    checkpoints: Sequence[tuple[int, Mapping[str, float]]], section: CheckpointSection
) -> dict[int, list[str]]:
    """For each step, in ascending order, the keys by which it is kept: none of them, and the checkpoint may go."""
    steps = sorted(step for step, _ in checkpoints)
    if section.keep_last is None:
        return {step: ["all are kept"] for step in steps}
    newest, best = steps[-section.keep_last :], _best(checkpoints, section)

    def reasons(step: int) -> list[str]:
        holds = {
            "keep_last": step in newest,
            "keep_every": section.keep_every > 0 and step % section.keep_every == 0,
            "powers_of_two": _is_power_of_two(step, section),
            "keep_best": step in best or (section.keep_best > 0 and not best),  # none is known to be worse
        }
        return [reason for reason, it_does in holds.items() if it_does]

    return {step: reasons(step) for step in steps}


def _best(checkpoints: Sequence[tuple[int, Mapping[str, float]]], section: CheckpointSection) -> list[int]:
    """Among equals the older ones."""
    judged = [(metrics[section.best_metric], step) for step, metrics in checkpoints if section.best_metric in metrics]
    beat = -1 if section.best_is == "highest" else 1
    return [step for _, step in sorted((beat * value, step) for value, step in judged)[: section.keep_best]]
