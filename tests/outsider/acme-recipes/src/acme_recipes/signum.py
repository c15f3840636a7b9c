import torch


class Signum(torch.optim.Optimizer):
    def __init__(self, config, /, *, parameters):
        super().__init__([one.parameter for one in parameters], {"lr": config.lr, "momentum": config.momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(momentum.sign(), alpha=-group["lr"])
