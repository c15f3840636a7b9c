"""What the distribution registers keeps to the contract."""

from forge_core.testing.callback import CallbackConformance
from forge_core.testing.plugin import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-slurm"


class TestSlurmRequeue(CallbackConformance):
    component = "forge-plugins-slurm:slurm_requeue"
