"""What the distribution registers keeps to the contract."""

from forge_core.testing.callback import CallbackConformance
from forge_core.testing.plugin import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-monitor"


class TestHealth(CallbackConformance):
    component = "forge-plugins-monitor:health"
    config = {"interval": 2}
