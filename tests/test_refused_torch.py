"""With a torch that Forge refuses as too old for something, tests of that are skipped, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forge_core.errors import ConfigError

SENTENCE = "parallel.ep: torch 2.11.0+cpu cannot shard experts; torch 2.13 can"
RANKS = f"2 of 2 ranks fail\nrank 0: [rank0]: forge_core.errors.ConfigError: {SENTENCE}\n\nrank 1: \nassert not [0, 1]"


@pytest.fixture
def outcome(request, monkeypatch):
    """How a test is reported that has failed, and why."""
    (root,) = (one for one in request.config.pluginmanager.get_plugins() if hasattr(one, "refusal_of_torch"))

    def reported(error, installed="2.11.0+cpu"):
        monkeypatch.setattr(torch.version, "__version__", installed)
        item = SimpleNamespace(path="test.py", location=("test.py", 7, "test"))
        call = SimpleNamespace(excinfo=error and SimpleNamespace(value=error))
        hook = root.pytest_runtest_makereport(item, call)
        next(hook)
        with pytest.raises(StopIteration) as done:
            hook.send(SimpleNamespace(failed=error is not None, outcome="failed" if error else "passed", longrepr=""))
        return done.value.value.outcome, done.value.value.longrepr

    return reported


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(SENTENCE),
        AssertionError(RANKS),
        AssertionError(f"error: {SENTENCE}\n\nassert 2 == 0\n + where 2 = run('…: {SENTENCE}\\n').returncode"),
    ],
)
def test_what_an_old_torch_is_refused_for_is_skipped_with_that_sentence(outcome, error):
    assert outcome(error) == ("skipped", ("test.py", 8, f"Skipped: {SENTENCE}"))


@pytest.mark.parametrize(
    ("error", "installed"),
    [
        (ConfigError(SENTENCE), "2.13.0+cpu"),
        (ConfigError(SENTENCE.replace("2.11.0", "2.13.0")), "2.13.0+cpu"),  # a newer one has moved it, say
        (ConfigError(SENTENCE), "2.12.0+cpu"),  # a test of the sentence
        (ConfigError("parallel.ep: 3 ranks cannot share 4 experts"), "2.11.0+cpu"),
        (RuntimeError(SENTENCE), "2.11.0+cpu"),
        (AssertionError(f"assert '{SENTENCE}' == ''"), "2.11.0+cpu"),
        (AssertionError("assert 1 == 2"), "2.11.0+cpu"),
    ],
)
def test_other_failures_stay_failures(outcome, error, installed):
    assert outcome(error, installed) == ("failed", "")


def test_what_passes_stays_so(outcome):
    assert outcome(None) == ("passed", "")
