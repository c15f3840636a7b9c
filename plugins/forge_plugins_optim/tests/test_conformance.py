from typing import ClassVar

from forge_testing.callback import CallbackConformance
from forge_testing.loss import LossConformance
from forge_testing.optimizer import OptimizerConformance
from forge_testing.package import PluginConformance
from forge_testing.scheduler import SchedulerConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-optim"


class TestAdafactor(OptimizerConformance):
    component = "forge-plugins-optim:adafactor"
    config: ClassVar = {"lr": 1e-2}


class TestAdafactorWithAllItsKeys(OptimizerConformance):
    component = "forge-plugins-optim:adafactor"
    config: ClassVar = {"lr": 5.0, "beta1": 0.5, "scale_parameter": True, "relative_step": True}


class TestAdamW(OptimizerConformance):
    component = "forge-plugins-optim:adamw"
    config: ClassVar = {"lr": 1e-2, "groups": [{"pattern": "head.*", "lr_scale": 0.5}]}


class TestAdamWWithStochasticRounding(OptimizerConformance):
    component = "forge-plugins-optim:adamw"
    config: ClassVar = {"lr": 1e-2, "stochastic_rounding": True}


class TestAdamWWithSplitWeights(OptimizerConformance):
    component = "forge-plugins-optim:adamw"
    config: ClassVar = {"lr": 1e-2, "rounding": "split"}


class TestAdamW8bit(OptimizerConformance):
    component = "forge-plugins-optim:adamw_8bit"
    config: ClassVar = {"lr": 1e-2, "min_elements": 0}


class TestGrouped(OptimizerConformance):
    component = "forge-plugins-optim:grouped"
    config: ClassVar = {
        "groups": [
            {"roles": ["matrix", "expert"], "optimizer": {"name": "muon", "lr": 2e-2, "dtype": "fp32"}},
            {"roles": ["norm", "bias"], "optimizer": {"name": "lion", "lr": 1e-2}},
            {"roles": ["head"], "optimizer": {"name": "adafactor", "lr": 1e-2}},
            {"optimizer": {"name": "adamw", "lr": 1e-2}},
        ]
    }


class TestGroupedOfOnesThatClip(OptimizerConformance):
    component = "forge-plugins-optim:grouped"
    config: ClassVar = {
        "groups": [
            {"roles": ["matrix", "expert"], "optimizer": {"name": "adamw", "lr": 2e-2}},
            {"optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0}},
        ]
    }


class TestLion(OptimizerConformance):
    component = "forge-plugins-optim:lion"
    config: ClassVar = {"lr": 1e-2}


class TestLionWithStochasticRounding(OptimizerConformance):
    component = "forge-plugins-optim:lion"
    config: ClassVar = {"lr": 1e-2, "rounding": "stochastic"}


class TestMuon(OptimizerConformance):
    component = "forge-plugins-optim:muon"
    config: ClassVar = {"lr": 2e-2, "dtype": "fp32"}
    roles = ("matrix", "expert")


class TestScheduleFreeAdamW(OptimizerConformance):
    component = "forge-plugins-optim:schedule_free_adamw"
    config: ClassVar = {"lr": 3e-2}


class TestGroupedWithAverages(OptimizerConformance):
    component = "forge-plugins-optim:grouped"
    config: ClassVar = {
        "groups": [
            {"roles": ["matrix", "expert"], "optimizer": {"name": "schedule_free_adamw", "lr": 3e-2}},
            {"optimizer": {"name": "lion", "lr": 1e-2}},
        ]
    }


class TestSGD(OptimizerConformance):
    component = "forge-plugins-optim:sgd"
    config: ClassVar = {"lr": 1e-2, "nesterov": True, "decoupled_weight_decay": False}


class TestSGDWithoutMomentum(OptimizerConformance):
    component = "forge-plugins-optim:sgd"
    config: ClassVar = {"lr": 1e-1, "momentum": 0.0}


class TestEMA(CallbackConformance):
    component = "forge-plugins-optim:ema"
    config: ClassVar = {"decay": 0.5, "warm_up": True}


class TestConstant(SchedulerConformance):
    component = "forge-plugins-optim:constant"


class TestConstantAfterWarmup(SchedulerConformance):
    component = "forge-plugins-optim:constant"
    config: ClassVar = {"warmup_steps": 10}


class TestConstantAfterTokens(SchedulerConformance):
    component = "forge-plugins-optim:constant"
    config: ClassVar = {"warmup_tokens": 2500}


class TestNone(SchedulerConformance):
    component = "forge-plugins-optim:none"


class TestLinear(SchedulerConformance):
    component = "forge-plugins-optim:linear"
    config: ClassVar = {"warmup_fraction": 0.1, "min_ratio": 0.0}


class TestPolynomial(SchedulerConformance):
    component = "forge-plugins-optim:polynomial"
    config: ClassVar = {"power": 0.5, "min_ratio": 0.0}


class TestRex(SchedulerConformance):
    component = "forge-plugins-optim:rex"


class TestWSD(SchedulerConformance):
    component = "forge-plugins-optim:wsd"
    config: ClassVar = {"warmup_steps": 10, "shape": "cosine"}


class TestInverseSqrt(SchedulerConformance):
    component = "forge-plugins-optim:inverse_sqrt"
    config: ClassVar = {"warmup_steps": 10}


class TestPiecewise(SchedulerConformance):
    component = "forge-plugins-optim:piecewise"
    config: ClassVar = {"boundaries": [0.5, 0.75], "ratios": [1.0, 0.1, 0.0]}


class TestCosine(SchedulerConformance):
    component = "forge-plugins-optim:cosine"


class TestCosineAfterWarmup(SchedulerConformance):
    component = "forge-plugins-optim:cosine"
    config: ClassVar = {"warmup_steps": 10, "decay_steps": 50, "min_ratio": 0.0}


class TestCrossEntropy(LossConformance):
    component = "forge-plugins-optim:cross_entropy"


class TestZLoss(LossConformance):
    component = "forge-plugins-optim:z_loss"
    config: ClassVar = {"coefficient": 0.1}


class TestZLossInChunks(LossConformance):
    component = "forge-plugins-optim:z_loss"
    config: ClassVar = {"coefficient": 0.1, "loss": {"name": "chunked_cross_entropy", "chunk_size": 7}}


class TestLabelSmoothing(LossConformance):
    component = "forge-plugins-optim:label_smoothing"
    config: ClassVar = {"smoothing": 0.2}


class TestBoth(LossConformance):
    component = "forge-plugins-optim:label_smoothing"
    config: ClassVar = {"smoothing": 0.2, "loss": {"name": "z_loss", "coefficient": 0.1}}


class TestDPOOfTexts(LossConformance):
    component = "forge-plugins-optim:dpo"


class TestChunkedCrossEntropy(LossConformance):
    component = "forge-plugins-optim:chunked_cross_entropy"
    config: ClassVar = {"chunk_size": 7}
