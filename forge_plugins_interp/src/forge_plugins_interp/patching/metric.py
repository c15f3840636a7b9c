"""What is measured of the logits of a patched forward. All are differentiable, and given ``(B, S, V)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from forge_core.errors import ConfigError, nearest_hint

Metric = Callable[[torch.Tensor], torch.Tensor]
"""From logits ``(B, S, V)`` to one number for each sample, ``(B,)``."""
NAMES = ("logit_diff", "probability", "loss", "kl")


def metric_named(name: str, clean: torch.Tensor, answers: Sequence[int]) -> Metric:
    """A metric at the last position.

    Args:
        name: ``logit_diff``, the logit of the first answer minus that of the second; ``probability`` and ``loss``, in
            nats, of the first answer; ``kl``, the divergence of the clean prediction from this one, in nats.
        clean: logits ``(1, S, V)`` of the clean prompt.
        answers: token ids.

    Raises:
        ConfigError: an unknown name, or too few answers.
    """
    if name not in NAMES:
        hint = nearest_hint(name, NAMES)
        raise ConfigError(f"--metric {name}: must be one of {', '.join(NAMES)}{hint}")
    if name == "logit_diff":
        if len(answers) != 2 or answers[0] == answers[1]:
            raise ConfigError(f"logit_diff needs two different answers, got {list(answers)}")
        first, second = answers
        return lambda logits: logits[:, -1, first].float() - logits[:, -1, second].float()
    if name == "kl":
        expected = torch.log_softmax(clean[:, -1].detach().float(), -1)
        return lambda logits: F.kl_div(
            torch.log_softmax(logits[:, -1].float(), -1),
            expected.expand(len(logits), -1),
            reduction="none",
            log_target=True,
        ).sum(-1)
    answer = answers[0]

    def log_probability(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits[:, -1].float(), -1)[:, answer]

    if name == "loss":
        return lambda logits: -log_probability(logits)
    return lambda logits: log_probability(logits).exp()
