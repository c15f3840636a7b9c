"""Conformance of cluster environments (contract: ``forge_core.contracts.cluster_environment``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from forge_core.contracts.cluster_environment import ClusterEnvironment
from forge_core.distributed.environment import world_size_of
from forge_testing.component_case import ComponentCase


class ClusterEnvironmentConformance(ComponentCase):
    """Subclass it, name the component and a task's variables, and pytest runs every check below on it."""

    kind = "cluster_environment"
    task: ClassVar[Mapping[str, str]]
    """The environment of one task of several, as the cluster sets it."""
    batch_script: ClassVar[Mapping[str, str]] = {}
    """That of a script of the same cluster which is no task; empty if it has none."""

    def cluster(self) -> ClusterEnvironment:
        cluster: ClusterEnvironment = self.make()
        return cluster

    def test_has_a_title(self) -> None:
        assert self.cluster().title, "title is empty, and messages name the cluster by it"

    def test_detects_its_tasks(self) -> None:
        assert self.cluster().detect(self.task), "a task of the cluster is not detected"

    def test_does_not_detect_another_machine(self) -> None:
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}

        for environment in ({}, torchrun):
            assert not self.cluster().detect(environment), f"a process with {environment} is detected"

    def test_a_task_is_a_rank(self) -> None:
        environment = dict(self.task)

        size = world_size_of(environment, self.cluster())

        assert size == int(environment["WORLD_SIZE"])
        assert 0 <= int(environment["RANK"]) < size

    def test_a_batch_script_is_no_rank(self) -> None:
        assert self.cluster().ranks(self.batch_script) is None, "a batch script would wait for ranks that do not come"

    def test_changes_nothing(self) -> None:
        environment = dict(self.task)
        cluster = self.cluster()

        cluster.detect(environment), cluster.ranks(environment), cluster.job(environment), cluster.end_time(environment)

        assert environment == self.task, "the environment has been changed"

    def test_explains_in_a_sentence_or_not_at_all(self) -> None:
        said = self.cluster().explain(ConnectionError("no answer"))

        assert said is None or said.strip(), "explain gives an empty sentence; give None"
