"""The supervisor keeps its contract.

Ranks that are killed, stopped or held up are in ``tests/system/test_lost_peers.py`` and ``tests/scale``.
"""

import pytest

from forge_testing.supervisor import SupervisorConformance


@pytest.mark.slow
class TestPeers(SupervisorConformance):
    component = "forge-plugins-monitor:peers"
