"""Logins at services: looked at where ``--require`` names them, as most runs need none."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.api import Check
from forge_core.contracts.check import CheckContext, Finding

_HERE = "forge_plugins_monitor.doctor.logins"
CHECKS = (
    Check(name="huggingface", summary="a login at the Hugging Face Hub", run=f"{_HERE}:look_at_huggingface"),
    Check(name="wandb", summary="a login at Weights & Biases", run=f"{_HERE}:look_at_wandb"),
)


def look_at_huggingface(_: CheckContext) -> Iterator[Finding]:
    """Say whether its library finds a token; the Hub is not asked."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        yield _missing("huggingface", "pip install 'forge-plugins-hf[hub]'")
        return
    yield _login("huggingface", get_token() is not None, "type hf auth login, or set HF_TOKEN")


def look_at_wandb(_: CheckContext) -> Iterator[Finding]:
    """Say whether its library finds a key; the server is not asked."""
    try:
        from forge_plugins_monitor.wandb_tracker import has_login
    except ImportError:
        yield _missing("wandb", "pip install 'forge-plugins-monitor[wandb]'")
        return
    yield _login("wandb", has_login(), "type wandb login, or set WANDB_API_KEY")


def _missing(subject: str, advice: str) -> Finding:
    return Finding(subject, "wrong", "its package is not installed", advice)


def _login(subject: str, is_there: bool, advice: str) -> Finding:
    if is_there:
        return Finding(subject, "fine", "this machine has a login")
    return Finding(subject, "wrong", "this machine has no login", advice)
