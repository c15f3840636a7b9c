"""Conformance of supervisors (contract: ``forge_core.contracts.supervisor``)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from forge_core.config.sections import RunSection
from forge_core.contracts.supervisor import Supervisor
from forge_testing.component_case import ComponentCase
from forge_testing.several_ranks import on_ranks


class SupervisorConformance(ComponentCase):
    """Subclass it and name the component; pytest runs every check below on it, on real ranks."""

    kind = "supervisor"

    def test_is_built_beaten_and_closed_on_two_ranks(self) -> None:
        assert on_ranks(type(self), "go", 2) == ["", ""]

    def test_is_built_beaten_and_closed_on_one_rank_whose_job_names_it(self) -> None:
        assert on_ranks(type(self), "go", 1) == [""]

    def test_an_error_of_this_rank_stays_what_it_is(self) -> None:
        for rank, problem in enumerate(on_ranks(type(self), "fail", 2)):
            assert not problem, f"rank {rank}: {problem}"

    def go(self) -> str:
        """On each rank."""
        with tempfile.TemporaryDirectory() as folder:
            supervisor = self._built(Path(folder))
            with supervisor.naming_lost_ranks():
                supervisor.beat()
                with supervisor.patient(60.0):
                    supervisor.beat(1.0)
            supervisor.close()
        return ""

    def fail(self) -> str:
        """On each rank: return what becomes of an error that is no other rank's fault."""
        error, problem = KeyError("a bug"), "an error was lost: naming_lost_ranks must raise it again"
        with tempfile.TemporaryDirectory() as folder:
            supervisor = self._built(Path(folder))
            try:
                with supervisor.naming_lost_ranks():
                    raise error
            except KeyError as caught:
                problem = "" if caught is error else f"it was replaced by {caught!r}"
            except Exception as caught:  # noqa: BLE001 - it is told
                problem = f"an error that no other rank is to blame for became {caught!r}"
            finally:
                supervisor.close()
        return problem

    def _built(self, folder: Path) -> Supervisor:
        supervisor: Supervisor = self.make(run=RunSection(), run_directory=folder)
        return supervisor
