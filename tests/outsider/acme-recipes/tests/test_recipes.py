from forge_testing.callback import CallbackConformance
from forge_testing.data_source import DataSourceConformance
from forge_testing.evaluation import EvaluationConformance
from forge_testing.loss import LossConformance
from forge_testing.optimizer import OptimizerConformance
from forge_testing.package import PluginConformance
from forge_testing.scheduler import SchedulerConformance


class TestPlugin(PluginConformance):
    dist = "acme-recipes"


class TestSignum(OptimizerConformance):
    component = "acme-recipes:signum"
    config = {"lr": 0.01}


class TestCubic(OptimizerConformance):
    component = "acme-recipes:cubic"
    config = {"lr": 0.1}


class TestRowScaled(OptimizerConformance):
    component = "acme-recipes:row_scaled"
    config = {"lr": 0.01}


class TestInverseSqrt(SchedulerConformance):
    component = "acme-recipes:inverse_sqrt"


class TestZLoss(LossConformance):
    component = "acme-recipes:z_loss"


class TestRamp(DataSourceConformance):
    component = "acme-recipes:ramp"
    holds_out = False


class TestTides(DataSourceConformance):
    component = "acme-recipes:tides"
    holds_out = False


class TestPolyak(CallbackConformance):
    component = "acme-recipes:polyak"


class TestSurprise(EvaluationConformance):
    component = "acme-recipes:surprise"
