"""Twenty steps of training, of our model and of the one it is compared with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 50


def assert_trained_alike(theirs: nn.Module, ours: nn.Module) -> None:
    """Losses to 1e-5 and gradient norms to 1e-4, of models with the same weights and a vocabulary of 50."""
    (expected, expected_norms), (found, norms) = (_trained(model.train()) for model in (theirs, ours))
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-5)
    torch.testing.assert_close(norms, expected_norms, atol=0, rtol=1e-4)


def _trained(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the gradient norm of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    rng = torch.Generator().manual_seed(2)
    losses, norms = [], []
    for _ in range(20):
        batch = torch.randint(VOCABULARY, (2, 17), generator=rng)
        output = model(batch[:, :-1])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), torch.tensor(norms)
