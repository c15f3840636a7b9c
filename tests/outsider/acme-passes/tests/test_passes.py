import torch

from forge_testing.package import PluginConformance
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.small_model import SEQ_LEN


class TestPlugin(PluginConformance):
    dist = "acme-passes"


class TestLabelBlocks(ParallelPassConformance):
    component = "acme-passes:label_blocks"

    def test_each_block_has_its_name_in_a_profile(self):
        model, _ = self.apply()

        with torch.profiler.profile() as profile:
            model(torch.zeros(1, SEQ_LEN, dtype=torch.int64))

        assert {"blocks.0", "blocks.1", "blocks.2"} <= {event.key for event in profile.key_averages()}


class TestOffloadInputs(ParallelPassConformance):
    component = "acme-passes:acme_offload"


class TestOffloadEverySecond(ParallelPassConformance):
    component = "acme-passes:acme_offload"
    config = {"every": 2}
