"""The router ``replayed_choice``: experts choose the tokens that they chose in one process.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from forge_core.contracts.router import Routing
from forge_plugins_moe.routers.expert_choice import ExpertChoice
from parity_matrix.config import ReplayedChoiceConfig

MARGIN = 0.01
"""By how much a score may be below one that was passed over. Scores here are 0.4 to 0.6; cells need 2e-3."""


class ReplayedChoice(ExpertChoice):
    """``expert_choice``, which writes down what each expert takes; or which gives what was written, whatever the order
    of the tokens, and refuses a choice that is not nearly its own."""

    config: ReplayedChoiceConfig

    def __init__(self, config: ReplayedChoiceConfig, /, *, dim: int, n_experts: int, **_: object) -> None:
        super().__init__(config, dim=dim, n_experts=n_experts)
        self.needs |= {"sequence", "noise"}  # in any layout, a number that only this token has in this layer and step

    def forward(
        self,
        hidden: torch.Tensor,
        valid: torch.Tensor | None = None,
        *,
        sequence: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> Routing:
        assert sequence is not None, "the router says that it needs it"
        assert noise is not None, "the same"
        return super().forward(hidden, valid, sequence=torch.stack((sequence, noise)))  # which it gives to ``takes``

    def takes(self, scores: torch.Tensor, valid: torch.Tensor | None, sequence: torch.Tensor | None) -> torch.Tensor:
        assert sequence is not None, "given by ``forward``"
        sequence, noise = sequence.unbind()
        own = super().takes(scores, valid, sequence)
        valid = torch.ones_like(own[:, 0]) if valid is None else valid
        if self.config.replays:
            return _replayed(scores, valid, sequence, noise, self.config.choices)
        with Path(self.config.choices).open("ab") as file:
            file.write(torch.cat((noise[:, None], own.long()), dim=1)[valid].cpu().numpy().tobytes())
        return own


# An operator, so that torch.compile does not look into it.
@torch.library.custom_op("parity_matrix::replayed", mutates_args=())
def _replayed(
    scores: torch.Tensor, valid: torch.Tensor, sequence: torch.Tensor, noise: torch.Tensor, file: str
) -> torch.Tensor:
    written, choices = _read(file, scores.shape[1])
    place = torch.searchsorted(written, noise).clamp(max=len(written) - 1)
    assert (written[place] == noise)[valid].all(), f"one process has not chosen among all of these tokens: {file}"
    takes = choices[place] & valid[:, None]
    for one in sequence[valid].unique():
        left = torch.where((valid & (sequence == one))[:, None] & ~takes, scores, -torch.inf).amax(0)
        worst = torch.where((sequence == one)[:, None] & takes, scores, torch.inf).amin(0)
        by = (left - worst).max().item()
        assert by <= MARGIN, f"experts took other tokens in one process, whose scores here are lower by {by:.3f}"
    return takes


@_replayed.register_fake
def _(
    scores: torch.Tensor, valid: torch.Tensor, sequence: torch.Tensor, noise: torch.Tensor, file: str
) -> torch.Tensor:
    return torch.empty_like(scores, dtype=torch.bool)


@functools.cache  # a process replays nothing that is written later
def _read(file: str, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of tokens in their order ``(N,)``, and which experts took each ``(N, E)``."""
    numbers = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.int64).view(-1, 1 + n_experts)
    numbers = numbers[numbers[:, 0].argsort()]
    return numbers[:, 0].contiguous(), numbers[:, 1:].bool()
