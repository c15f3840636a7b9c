"""The page of promises names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_that_guards_a_promise_is_there():
    page = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
    promises = page.split("\n## ")[1:]

    assert len(promises) == 9
    for promise in promises:
        guards = re.findall(r"`([\w/.]*tests/[\w/.]*|test_\w+\.py)`", promise)
        assert guards, promise
        folder = ""
        for guard in guards:
            folder = guard if guard.endswith("/") else folder
            assert (ROOT / guard).exists() or (ROOT / folder / guard).exists(), guard
