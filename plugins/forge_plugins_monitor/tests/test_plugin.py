"""What the distribution registers keeps to the contract."""

from forge_testing.callback import CallbackConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-monitor"


class TestHealth(CallbackConformance):
    component = "forge-plugins-monitor:health"
    config = {"interval": 2}
