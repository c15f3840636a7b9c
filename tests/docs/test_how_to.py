"""How-to pages: every command works, and says what the page shows."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest

from doc_pages import DOCS, ROOT, commands, files, not_said, type_in, write_text

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("how-to/*.md") if path.stem != "index")
ELSEWHERE = {
    r"^torchrun ": "needs several hosts",
    r"^forge submit": "the tests of forge-plugins-slurm have a Slurm",
}
"""What is not typed here, by pattern, and why."""


BY_DAY = ("find-why-a-run-stopped", "resume-and-branch")
"""Pages that are typed by day: runs that fail, and that follow from each other. The others are typed by night."""


def when(page: str) -> object:
    return pytest.param(page, marks=() if Path(page).stem in BY_DAY else pytest.mark.nightly)


@pytest.fixture(scope="module", params=map(when, PAGES), ids=lambda page: Path(page).stem)
def typed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[str]]:
    """A page, the folder of a reader who has typed all of it, and what was not as the page says."""
    folder = tmp_path_factory.mktemp("reader")
    write_text(folder)
    for name, text in {**files("docs/how-to/index.md"), **files(request.param)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    wrong = []
    for command, shown in commands(request.param):
        if any(re.search(pattern, command) for pattern in ELSEWHERE):
            continue
        code, said = type_in(command, folder)
        missing = not_said(shown, said)
        if missing or (code == 0) == any(line.startswith("error: ") for line in shown):
            wrong.append(f"{command}: exit code {code}; not said: {missing}; said:\n{said}")
    return Path(request.param).stem, folder, wrong


@pytest.mark.slow
def test_what_a_page_types_works_and_says_what_it_shows(typed):
    _, _, wrong = typed
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_what_a_page_promises_of_its_runs_is_so(typed):
    page, folder, _ = typed

    if page == "reproduce-a-run":
        assert losses(folder / "runs/c") == losses(folder / "runs/again")
    if page == "resume-and-branch":
        assert [step for step, _ in losses(folder / "runs/slower")] == [30, 40]
    if page == "scale-to-many-gpus":
        assert losses(folder / "runs/two")[0][1] == pytest.approx(5.64, abs=0.01)
    if page == "debug-a-loss-curve":
        assert losses(folder / "runs/few")[-1][1] < 2
        report = (folder / "c.html").read_text(encoding="utf-8")
        assert "grad_norm" in report
    if page == "log-a-number":
        one, two = (first_line(folder / "runs" / run)["norm/embed"] for run in ("norms", "two"))
        assert two == pytest.approx(one, rel=1e-4)
    if page == "log-captions":
        one, two = ((folder / "runs" / run / "log.txt").read_text(encoding="utf-8") for run in ("captions", "two"))
        said = [re.findall(r"step \d+, 0000\d.png: .*", log) for log in (one, two)]
        assert len(said[0]) == 4
        assert said[0] == said[1]
    if page == "report-a-bug":
        with tarfile.open(folder / "report.tar.gz") as archive:
            names = {Path(name).name for name in archive.getnames()}
        assert names == {"environment.json", "events.jsonl", "job.toml", "log.txt"}
    if page == "profile-a-step":
        assert sorted(path.suffix for path in (folder / "runs/profiled/profile").iterdir()) == [".gz", ".txt"]


def first_line(run: Path) -> dict[str, float]:
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        return dict(json.loads(next(lines)))


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_each_page_has_a_row_for_what_else_one_may_see():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "| you see |" in text or "## If it still runs out" in text or "## It falls" in text, page
        assert commands(page), page
        assert "(index.md)" in text.partition("\n```")[0].partition("\n## ")[0], f"{page} does not say what c.toml is"


def test_the_table_of_tasks_names_every_page():
    listed = re.findall(r"^([a-z-]+)$", (DOCS / "how-to/index.md").read_text(encoding="utf-8"), re.M)
    assert sorted(f"docs/how-to/{name}.md" for name in listed) == PAGES
