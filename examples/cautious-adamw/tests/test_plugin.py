from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "cautious-adamw"
