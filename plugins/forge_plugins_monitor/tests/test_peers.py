"""The supervisor keeps its contract.

Ranks that are killed, stopped or held up are in ``tests/system/test_lost_peers.py`` and ``tests/scale``.
"""

import pytest
import torch

from forge_core.config.sections import RunSection
from forge_core.distributed.mesh import join_process_group
from forge_core.errors import SaveError
from forge_plugins_monitor.config import PeersConfig
from forge_plugins_monitor.peers.peer_monitor import PeerMonitor
from forge_testing.supervisor import SupervisorConformance


@pytest.mark.slow
class TestPeers(SupervisorConformance):
    component = "forge-plugins-monitor:peers"


def test_a_process_alone_that_cannot_reach_its_disk_has_lost_no_other_one(tmp_path):
    join_process_group(torch.device("cpu"))
    alone = PeerMonitor(PeersConfig(), run=RunSection(), run_directory=tmp_path)
    try:
        with pytest.raises(SaveError, match="Connection timed out"), alone.naming_lost_ranks():
            raise SaveError("cannot write step_00000003: Connection timed out")
    finally:
        alone.close()
        torch.distributed.destroy_process_group()
