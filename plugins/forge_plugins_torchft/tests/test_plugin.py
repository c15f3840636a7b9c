"""What the distribution registers keeps to the contract."""

from forge_testing.callback import CallbackConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-torchft"


class TestTorchft(CallbackConformance):
    component = "forge-plugins-torchft:torchft"
    config = {"lighthouse": "http://127.0.0.1:1"}
