"""``pipeline`` keeps the contract of split passes, on real ranks."""

import torch

from forge_testing.small_model import SmallModel
from forge_testing.split_pass import SplitPassConformance


class TestOneStageARank(SplitPassConformance):
    component = "forge-plugins-parallel:pipeline"


class PositionsFirst(torch.nn.Module):
    """A block that works on ``(S, B, D)``: neither what it gives nor the gradient of what it reads is contiguous."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.down = torch.nn.Linear(dim, dim, bias=False), torch.nn.Linear(dim, dim, bias=False)

    def forward(self, hidden, visible):
        return self.down(torch.tanh(self.up(hidden.transpose(0, 1)))).transpose(0, 1)


class TestTwoStagesARankInAV(SplitPassConformance):
    component = "forge-plugins-parallel:pipeline"
    config = {"schedule": "ZBVZeroBubble"}

    def make_model(self, n_layers=4):
        model = SmallModel(n_layers=n_layers)
        for key in model.blocks:
            model.blocks[key] = PositionsFirst(model.dim)
        return model
