"""What the distribution registers keeps to the contract."""

from forge_testing.callback import CallbackConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-slurm"


class TestSlurmRequeue(CallbackConformance):
    component = "forge-plugins-slurm:slurm_requeue"
