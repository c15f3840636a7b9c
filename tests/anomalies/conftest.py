from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saboteur_site(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What has to be on the path of a process for the plugin in ``saboteur/`` to be installed there."""
    site = tmp_path_factory.mktemp("site")
    information = site / "saboteur-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[forge.v1]\nsaboteur = saboteur.plugin\n")
    return [str(site), str(Path(__file__).parent)]
