"""The last line of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_core.run.summary import EndReport, duration_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.42, "0.4 s"),
        (59.4, "59 s"),
        (59.9, "1 min 0 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 5 min"),
        (3 * 86_400 + 3600, "3 d 1 h"),
    ],
)
def test_a_duration_is_told_in_the_two_units_that_matter(seconds, words):
    assert duration_words(seconds) == words


def test_what_cannot_be_sampled_from_says_where_its_files_are():
    prepared = SimpleNamespace(
        start=SimpleNamespace(step=0),
        directory=SimpleNamespace(path=Path("runs/a run")),
        source=SimpleNamespace(tokenizer=None),
        catalog=SimpleNamespace(commands={"generate": ()}),
    )
    report = EndReport(prepared)
    report.note({"step": 3, "loss": 2.5})

    assert report.line(3).split("; ")[1:] == ["loss 2.5", "files in runs/a run"]

    prepared.source.tokenizer = object()
    report.note({"step": 3, "eval/loss": 2.3104})
    report.note({"step": 4, "loss": 9.0})

    assert report.line(4).split("; ")[1:] == ["eval/loss 2.31", "forge generate 'runs/a run'"]

    prepared.catalog.commands.clear()  # its package is not installed

    assert report.line(4).split("; ")[2] == "files in runs/a run"
    assert [report.line(number).partition(" in ")[0] for number in (1, 2)] == ["done: 1 step", "done: 2 steps"]
