from __future__ import annotations

from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "forge-plugins-interp"
