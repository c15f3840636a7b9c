import torch

from forge_plugins_optim.whole_matrices import map_whole


class Cubic(torch.optim.Optimizer):
    """Matrices go along M Mᵀ M of their momentum M, which no rank has without the others; all else along M."""

    def __init__(self, config, /, *, parameters):
        self._matrices = {one.parameter for one in parameters if one.role in ("matrix", "expert")}
        super().__init__([one.parameter for one in parameters], {"lr": config.lr, "momentum": config.momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            momenta = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momenta[parameter] = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momenta[parameter].lerp_(parameter.grad, 1 - group["momentum"])
            matrices = [parameter for parameter in momenta if parameter in self._matrices]
            cubed = map_whole([momenta[parameter] for parameter in matrices], cubes)
            for parameter, step in (momenta | dict(zip(matrices, cubed, strict=True))).items():
                parameter.sub_(step, alpha=group["lr"])


def cubes(matrices):
    cubed = matrices @ (matrices.mT @ matrices)
    return cubed / cubed.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)
