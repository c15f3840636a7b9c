"""The tests that need a GPU, run by pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpu_steps.step import FailedError, Figures, Setting, SkippedError, must

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/**/test_*.py", "forge_*/tests/**/test_*.py", "plugins/*/tests/**/test_*.py")


def marked_tests(setting: Setting) -> Figures:
    """``pytest -m gpu``: how many pass, fail and are skipped. Only files that mention the mark are collected."""
    found = (file for pattern in TESTS for file in sorted(ROOT.glob(pattern)))
    files = [file for file in found if "mark.gpu" in file.read_text()]
    if not files:
        raise SkippedError("the tests are not here")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {outcome: int(count) for count, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+).*$", done.stdout, re.MULTILINE)
    failed += dict.fromkeys(re.findall(r"^E  +(.+)$", done.stdout, re.MULTILINE))
    if not counts:
        raise FailedError((done.stdout + done.stderr).strip()[-1500:], {})
    return must({"; ".join(failed) or "pytest fails": done.returncode != 0}, counts)
