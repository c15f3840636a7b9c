import torch


class Signum(torch.optim.Optimizer):
    leaves_out = True
    left_out = None

    def __init__(self, config, /, *, parameters):
        super().__init__([one.parameter for one in parameters], {"lr": config.lr, "momentum": config.momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                old = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                new, lr = old.lerp(parameter.grad, 1 - group["momentum"]), group["lr"]
                if self.left_out is not None:
                    new, lr = torch.where(self.left_out == 1, old, new), lr * (1 - self.left_out)
                parameter.sub_(new.sign() * lr)
                old.copy_(new)
