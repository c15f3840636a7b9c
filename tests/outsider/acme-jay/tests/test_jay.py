from forge_testing.model import ModelConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "acme-jay"


class TestJay(ModelConformance):
    component = "acme-jay:jay"
    config = {"width": 32, "depth": 3, "looks": 4}


class TestTiedJay(ModelConformance):
    component = "acme-jay:jay"
    config = {"width": 32, "depth": 3, "looks": 4, "tied": True}
