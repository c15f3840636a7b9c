from forge_core.testing.loss import LossConformance
from forge_core.testing.optimizer import OptimizerConformance
from forge_core.testing.plugin import PluginConformance
from forge_core.testing.scheduler import SchedulerConformance


class TestPlugin(PluginConformance):
    dist = "acme-recipes"


class TestSignum(OptimizerConformance):
    component = "acme-recipes:signum"
    config = {"lr": 0.01}


class TestInverseSqrt(SchedulerConformance):
    component = "acme-recipes:inverse_sqrt"


class TestZLoss(LossConformance):
    component = "acme-recipes:z_loss"
