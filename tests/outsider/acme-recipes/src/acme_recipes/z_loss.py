import torch.nn.functional as F

from forge_core.contracts.loss import IGNORED, LossSum


class ZLoss:
    """Chowdhery et al., "PaLM", section 5."""

    def __init__(self, config, /):
        self.coefficient = config.coefficient

    def __call__(self, hidden, head, targets):
        logits, targets = head(hidden).float().flatten(0, -2), targets.flatten()
        valid = targets != IGNORED
        z = logits.logsumexp(-1).square() * valid
        entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return LossSum(entropy + self.coefficient * z.sum(), valid.sum())
