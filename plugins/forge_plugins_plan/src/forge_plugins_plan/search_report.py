"""The layouts that a search has found, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from forge_plugins_plan.clock import PARTS
from forge_plugins_plan.report import needed_gib
from forge_plugins_plan.search import Layout, Search
from forge_plugins_plan.step_report import PART_WORDS

_TOO_LARGE = 3
"""How many of the ones that do not fit are told."""


def as_text(search: Search, ranks: int) -> Iterator[str]:
    """The search in lines."""
    yield f"Layouts of {ranks:,} ranks: {search.considered:,} considered"
    yield f"  {search.batch_not_shared:>7,} degrees among which the step's sequences cannot be shared out evenly"
    yield f"  {search.over_memory:>7,} too large by an estimate"
    yield f"  {search.slower:>7,} slower by an estimate than the simulated ones"
    yield f"  {search.refused:>7,} refused by the rules of the job, of those whose turn came"
    if search.not_simulated:
        yield f"  {search.not_simulated:>7,} of which a step cannot be simulated"
    yield f"  {search.simulated:>7,} simulated"
    yield ""
    if not search.best:
        yield "None of them fits"
    else:
        yield f"{'':>4}{'tokens/s':>12}{'step, s':>10}{'MFU':>8}{'GiB':>8}  degrees, microbatches, recomputed"
        for number, one in enumerate(search.best, 1):
            figures = f"{one.tokens_per_second:>12,.0f}{one.seconds:>10.3f}{one.mfu:>8.1%}"
            yield f"{number:>3} {figures}{needed_gib(one.peak_bytes):>8.1f}  {_words(one)}"
            yield f"      {' '.join(one.candidate.overrides)}"
            if number > 1:
                yield f"      {why_slower(one, search.best[0])}"
    for one in search.too_large[:_TOO_LARGE]:
        size = f"{needed_gib(one.peak_bytes):.1f} GiB"
        yield f"  does not fit: {size}, {one.tokens_per_second:,.0f} tokens/s: {_words(one)}"


def why_slower(one: Layout, best: Layout) -> str:
    """The part that takes most beyond what it takes of the best."""
    more = {part: one.parts[part] - best.parts[part] for part in PARTS}
    most = max(PARTS, key=lambda part: more[part])
    share = one.parts[most] / one.seconds
    recomputes = one.candidate.recomputed != best.candidate.recomputed and most in ("products", "attention", "memory")
    why = f", as it recomputes otherwise ({one.candidate.recomputed})" if recomputes else ""
    seconds = f"{more[most]:.3f} s" if more[most] >= 0.0005 else f"{more[most] * 1e3:.3g} ms"
    return f"slower: {PART_WORDS[most]} {share:.1%} of its step, {seconds} more than the first{why}"


def _words(one: Layout) -> str:
    candidate = one.candidate
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in candidate.degrees.items() if degree > 1) or "one rank"
    return f"{degrees}; {candidate.microbatches} of {candidate.batch_size}; {candidate.recomputed}"
