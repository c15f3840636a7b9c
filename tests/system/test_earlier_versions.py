"""A run that an earlier version began is resumed by this one, and trains on as it would have then.

``release/keep_run.py`` has written the archives, each with the version in its name.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from forge_core.errors import ExitCode
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.run.run import run_job

ARCHIVES = sorted((Path(__file__).parent / "earlier_versions").glob("*.tar.gz"))
VALUES = ("step", "loss", "grad_norm", "lr", "tokens", "eval/loss")


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def before(request, tmp_path, monkeypatch) -> Path:
    """The folder in which that version ran."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(file: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: line[name] for name in VALUES if name in line} for line in lines]


def test_it_trains_on_as_it_would_have(before):
    catalog = discover()
    job = load_job(before / "before.toml", catalog=catalog, world_size=1)

    assert run_job(job, catalog) is ExitCode.COMPLETED

    run = before / "runs" / "before"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [4]
    resumed, straight = values(run / "metrics.jsonl"), values(before / "straight.jsonl")
    assert [sorted(line) for line in resumed] == [sorted(line) for line in straight]
    for one, other in zip(resumed, straight, strict=True):
        assert one == pytest.approx(other, rel=1e-5)  # other processors add in another order


def test_there_is_one_and_they_stay_small():
    assert "0.1.0.tar.gz" in [path.name for path in ARCHIVES]
    assert all(path.stat().st_size < 60_000 for path in ARCHIVES)
