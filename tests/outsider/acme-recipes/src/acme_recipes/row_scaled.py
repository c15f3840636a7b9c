import torch
from torch.distributed.tensor import DTensor, Replicate, zeros


class RowScaled(torch.optim.Optimizer):
    """Divides by the root of a running mean of squares, one for each row, which is cut as rows are."""

    def __init__(self, config, /, *, parameters):
        super().__init__([one.parameter for one in parameters], {"lr": config.lr, "momentum": config.momentum})

    def empty_state(self, parameter, slot, shape, dtype):
        if not isinstance(parameter, DTensor) or parameter.ndim == 1:
            return None
        last = parameter.ndim - 1
        placements = [Replicate() if one.is_shard(last) else one for one in parameter.placements]
        return zeros(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = parameter.grad.square()
                if parameter.ndim > 1:
                    mean = reduced(mean.mean(-1))
                scale = self.state[parameter].setdefault("scale", torch.ones_like(mean))
                scale.lerp_(mean, 1 - group["momentum"])
                root = scale.unsqueeze(-1) if parameter.ndim > 1 else scale
                parameter.sub_(parameter.grad / (root.sqrt() + 1e-8), alpha=group["lr"])


def reduced(mean):
    """Where ranks have columns, the mean of their means."""
    if not isinstance(mean, DTensor):
        return mean
    return mean.redistribute(placements=[Replicate() if one.is_partial() else one for one in mean.placements])
