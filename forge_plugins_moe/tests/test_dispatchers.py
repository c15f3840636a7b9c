"""Dispatchers keep their contract: whatever travels, and however, it is as if all experts were on one rank."""

import pytest

from forge_plugins_moe.testing.dispatcher import DispatcherConformance

pytestmark = pytest.mark.slow


class TestAllToAll(DispatcherConformance):
    component = "forge-plugins-moe:all_to_all"
    ranks = 3


class TestHierarchicalOnTwoNodesOfTwo(DispatcherConformance):
    component = "forge-plugins-moe:hierarchical"
    config = {"ranks_per_node": 2}
    ranks = 4


class TestHierarchicalOnFourNodesOfOne(DispatcherConformance):
    component = "forge-plugins-moe:hierarchical"
    config = {"ranks_per_node": 1}
    ranks = 4


class TestHierarchicalOnOneNodeOfTwo(DispatcherConformance):
    component = "forge-plugins-moe:hierarchical"
    config = {"ranks_per_node": 2}
    ranks = 2


class TestHierarchicalAlone(DispatcherConformance):
    component = "forge-plugins-moe:hierarchical"
    config = {"ranks_per_node": 8}
    ranks = 1
