import torch

from forge_core.contracts.callback import Callback


class Polyak(Callback):
    """The mean of all weights since the start is what is evaluated, whatever optimizer trains them."""

    def __init__(self, config, /): ...

    def run_start(self, run):
        self.weights = run.parameters
        self.means = {name: one.detach().clone() for name, one in run.parameters.items()}
        self.count = torch.zeros((), device=run.device)

    @torch.no_grad()
    def step_end(self, run, context):
        counts = 1 - context.left_out
        self.count += counts
        for name, one in self.weights.items():
            self.means[name] += (one - self.means[name]) * (counts / self.count.clamp(min=1))
        if context.logged:
            away = {f"polyak/away/{name}": (one - self.means[name]).norm() for name, one in self.weights.items()}
            run.report(away)

    def tensors(self):
        return {"count": self.count, **self.means}

    def evaluation_weights(self):
        return self.means
