"""``cluster.toml``: what is true of a cluster for every job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import deep_iterable, deep_mapping, ge, gt, le, matches_re, min_len, optional

from forge_core.config.sections import is_time_limit
from forge_core.errors import ConfigError
from forge_core.job import ConfigProblems, InvalidError, read_document, structure
from forge_core.registry.catalog import Catalog

FILE = "cluster.toml"
VARIABLE = "FORGE_CLUSTER"
"""Environment variable with the path of the file, for one that does not lie next to the configuration."""

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds after a signal at which torchrun kills its ranks, 30 by default."""

Launcher = Literal["srun", "torchrun"]


def _is_option(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not value.startswith("--") or not value.isprintable():
        raise ValueError(f"must be written as --option=value, got {value!r}")


def _is_name(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    """One word of the script's header."""
    if not value or not value.isprintable() or " " in value:
        raise ValueError(f"'{attribute.name}' must be a name without spaces, got {value!r}")


def _is_variable(_: object, attribute: attrs.Attribute[Any], name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} cannot be the name of an environment variable: letters, _ and, not first, digits")


@attrs.frozen(kw_only=True)
class Cluster:
    """The facts of one cluster. Every key can be left out; ``forge submit`` has options for frequent changes."""

    partition: str | None = attrs.field(default=None, validator=optional(_is_name))
    """Where to submit; by default Slurm's own default."""
    account: str | None = attrs.field(default=None, validator=optional(_is_name))
    """Whom the time is charged to."""
    qos: str | None = attrs.field(default=None, validator=optional(_is_name))
    """Quality of service."""
    time: str | None = attrs.field(default=None, validator=optional(is_time_limit))
    """Time limit of one start of a job, as Slurm writes it: ``"12:00:00"``, ``"2-00:00:00"``. A run that needs longer
    is requeued until it is done."""
    gpus_per_node: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """GPUs to ask for on each node; one rank a GPU."""
    ranks_per_node: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """For nodes without GPUs: processes on each; 1 by default."""
    cpus_per_rank: int | None = attrs.field(default=None, validator=optional(gt(0)))
    """Cores for each rank, its data workers included."""
    memory: str | None = attrs.field(default=None, validator=optional(matches_re(r"\d+[KMGT]?")))
    """Memory of each node, such as ``"900G"``; ``"0"`` is all of it."""
    launcher: Launcher = "srun"
    """``srun`` starts every rank; ``torchrun`` is started by ``srun`` once a node, and starts the ranks."""
    signal_lead: int = attrs.field(default=120, validator=[gt(0), le(65_535)])  # more than that sbatch does not take
    """Seconds before the time limit at which the run is told to save. Slurm looks every 30 seconds. It must hold a step
    and a checkpoint."""
    max_failures: int = attrs.field(default=3, validator=ge(0))
    """How many crashes in a row without a new checkpoint are answered by starting again. Preemptions do not count."""
    spare_nodes: int = attrs.field(default=0, validator=ge(0))
    """Nodes that a job has beside the training ones. After a crash, the run starts again within the job. A spare node
    replaces one that was lost."""
    modules: tuple[str, ...] = attrs.field(default=(), validator=deep_iterable(min_len(1)))
    """What to ``module load``."""
    setup: tuple[str, ...] = ()
    """Further lines of shell before the run is started, such as ``source env.sh``."""
    environment: Mapping[str, str] = attrs.field(factory=dict, validator=deep_mapping(_is_variable))
    """Environment variables of the run: ``{NCCL_SOCKET_IFNAME = "ib0", GLOO_SOCKET_IFNAME = "ib0"}``."""
    python: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """The interpreter on the nodes, or in the container; by default the one that submits."""
    container: tuple[str, ...] = attrs.field(default=(), validator=deep_iterable(min_len(1)))
    """A command that runs another one inside a container: ``["apptainer", "exec", "--nv", "image.sif"]``."""
    sbatch_options: tuple[str, ...] = attrs.field(default=(), validator=deep_iterable(_is_option))
    """Anything else for ``sbatch``: ``["--exclusive", "--constraint=h100"]``."""
    srun_options: tuple[str, ...] = attrs.field(default=(), validator=deep_iterable(_is_option))
    """Anything else for ``srun``, such as ``["--container-image=image.sqsh"]`` where Slurm itself knows containers."""

    def __attrs_post_init__(self) -> None:
        if self.gpus_per_node is not None and self.ranks_per_node is not None:
            raise ConfigError(
                f"gpus_per_node = {self.gpus_per_node} and ranks_per_node = {self.ranks_per_node} are both given; "
                "there is one rank a GPU, and ranks_per_node is for nodes without"
            )
        if self.spare_nodes and self.launcher != "srun":
            raise ConfigError(
                f'spare_nodes = {self.spare_nodes} needs launcher = "srun", got "{self.launcher}": srun says on which '
                "node a rank was lost, and torchrun does not"
            )
        patience = self.environment.get(SHUTDOWN_TIMEOUT, "")
        if patience.isdecimal() and int(patience) < self.signal_lead:
            raise ConfigError(
                f"environment.{SHUTDOWN_TIMEOUT} = {patience} s is below signal_lead = {self.signal_lead} s: torchrun "
                "would kill its ranks while they save"
            )

    @property
    def ranks_on_each_node(self) -> int:
        """One a GPU, otherwise as many as are asked for."""
        return self.gpus_per_node or self.ranks_per_node or 1


def find_cluster_file(config: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file that ``FORGE_CLUSTER`` names, or ``cluster.toml`` next to the configuration, or ``None``."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE]).expanduser()
    beside = config.parent / FILE
    return beside if beside.exists() else None


def read_cluster(path: Path | None) -> Cluster:
    """The facts in ``path``; the defaults if there is no file.

    Raises:
        ConfigError: with everything that is wrong in the file, by line.
    """
    if path is None:
        return Cluster()
    document = read_document(path)
    try:
        return structure(document.table, Cluster, Catalog([]))
    except InvalidError as error:
        found = [attrs.evolve(one, location=document.locate(one.path)) for one in error.problems]
        raise ConfigProblems(found, str(path)) from error


def with_options(cluster: Cluster, **options: Any) -> Cluster:
    """The facts as the command line changes them; ``None`` leaves a fact as it is.

    Raises:
        ConfigError: an option is wrong by itself, or does not go with the rest.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if "gpus_per_node" in given:  # on a cluster whose file says how many ranks nodes without GPUs have
        given.setdefault("ranks_per_node", None)
    elif "ranks_per_node" in given:
        given["gpus_per_node"] = None
    try:
        return attrs.evolve(cluster, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
