"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Check, Command, Component, Kind, hookimpl

FORGE_API = "1.5"


@hookimpl
def forge_supervisors() -> Iterable[Component]:
    """Which rank is lost."""
    yield Component(
        name="peers",
        summary="ranks publish signs of life; which one is missing is found out, and all end",
        factory="forge_plugins_monitor.peers.peer_monitor:PeerMonitor",
        config="forge_plugins_monitor.config:PeersConfig",
    )


@hookimpl
def forge_observers() -> Iterable[Component]:
    """What is looked at in every run."""
    yield Component(
        name="early_update",
        summary="whether parameters change while gradients are computed",
        factory="forge_plugins_monitor.observers.early_update:EarlyUpdate",
    )
    yield Component(
        name="non_finite_origin",
        summary="which module was the first with a value that is not finite",
        factory="forge_plugins_monitor.observers.non_finite_origin:NonFiniteOrigin",
    )
    yield Component(
        name="optimizer_state",
        summary="whether a resume could give an optimizer what it has",
        factory="forge_plugins_monitor.observers.optimizer_state:OptimizerState",
    )


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What happens beside training."""
    yield Component(
        name="activation_norms",
        summary="how large the hidden states are after each block",
        factory="forge_plugins_monitor.activation_norms:ActivationNorms",
        config="forge_plugins_monitor.config:ActivationNormsConfig",
    )
    yield Component(
        name="curve_extrapolation",
        summary="the loss at the end of the run, by a power law through the losses so far",
        factory="forge_plugins_monitor.curve_extrapolation:CurveExtrapolation",
        config="forge_plugins_monitor.config:CurveExtrapolationConfig",
    )
    yield Component(
        name="garbage_collection",
        summary="Python's garbage is collected on all ranks in the same steps, and never between",
        factory="forge_plugins_monitor.garbage_collection:GarbageCollection",
        config="forge_plugins_monitor.config:GarbageCollectionConfig",
    )
    yield Component(
        name="gpu_memory",
        summary="what CUDA's allocator holds, and how often it ran short, in the metrics",
        factory="forge_plugins_monitor.gpu_memory:GpuMemory",
        config="forge_plugins_monitor.config:GpuMemoryConfig",
    )
    yield Component(
        name="gpu_metrics",
        summary="how busy, warm and full the GPUs are, in the metrics",
        factory="forge_plugins_monitor.gpu_metrics:GpuMetrics",
        config="forge_plugins_monitor.config:GpuMetricsConfig",
    )
    yield Component(
        name="health",
        summary="looks at GPUs, memory and the network between ranks every so many steps",
        factory="forge_plugins_monitor.health:Health",
        config="forge_plugins_monitor.config:HealthConfig",
    )
    yield Component(
        name="layer_norms",
        summary="norms of gradients and weights, and how far updates move them, layer by layer",
        factory="forge_plugins_monitor.layer_norms:LayerNorms",
        config="forge_plugins_monitor.config:LayerNormsConfig",
    )
    yield Component(
        name="memory_snapshot",
        summary="what CUDA's allocator has given out in a few steps, and when memory runs out",
        factory="forge_plugins_monitor.memory_snapshot:MemorySnapshot",
        config="forge_plugins_monitor.config:MemorySnapshotConfig",
    )
    yield Component(
        name="profile",
        summary="a trace of a few steps, and their time by kinds of work and kernels",
        factory="forge_plugins_monitor.profile:Profile",
        config="forge_plugins_monitor.config:ProfileConfig",
    )
    yield Component(
        name="smoothed",
        summary="moving averages of the loss, the speed and what else is named, in the metrics",
        factory="forge_plugins_monitor.smoothed:Smoothed",
        config="forge_plugins_monitor.config:SmoothedConfig",
    )


@hookimpl
def forge_trackers() -> Iterable[Component]:
    """Where metrics are sent."""
    yield Component(
        name="mlflow",
        summary="MLflow: a server or a database",
        factory="forge_plugins_monitor.mlflow_tracker:Mlflow",
        config="forge_plugins_monitor.tracker_config:MlflowConfig",
        modules=("mlflow",),
    )
    yield Component(
        name="tensorboard",
        summary="event files of TensorBoard in the run's directory",
        factory="forge_plugins_monitor.tensorboard_tracker:TensorBoard",
        config="forge_plugins_monitor.tracker_config:TensorBoardConfig",
        modules=("tensorboard",),
    )
    yield Component(
        name="wandb",
        summary="Weights & Biases, online or offline",
        factory="forge_plugins_monitor.wandb_tracker:Wandb",
        config="forge_plugins_monitor.tracker_config:WandbConfig",
        modules=("wandb",),
    )


@hookimpl
def forge_checks() -> Iterable[Check]:
    """What ``forge doctor`` looks at on every machine, in the order of its report."""
    folder = "forge_plugins_monitor.doctor"
    yield Check(name="software", summary="Python, torch, CUDA, NCCL", run=f"{folder}.software:look")
    yield Check(name="gpus", summary="driver, memory, health, how they reach each other", run=f"{folder}.gpus:look")
    yield Check(name="gloo", summary="two processes add a tensor", run=f"{folder}.gloo:look")
    yield Check(name="network", summary="names, interfaces, what launchers set", run=f"{folder}.network:look")
    yield Check(name="storage", summary="space, speed, what the file system keeps to", run=f"{folder}.storage:look")
    yield Check(name="plugins", summary="broken, incompatible, in conflict", run=f"{folder}.plugins:look")


@hookimpl
def forge_commands() -> Iterable[Command]:
    """What tells of machines and runs, and what helps at the command line."""
    yield Command(
        name="checkpoint",
        summary="list, show, verify and prune the checkpoints of a run",
        run="forge_plugins_monitor.checkpoints:checkpoint",
    )
    yield Command(
        name="completion",
        summary="what bash, zsh or fish need to complete commands, options, keys and components",
        run="forge_plugins_monitor.completion.command:completion",
    )
    yield Command(
        name="docs",
        summary="the documentation in the terminal, without a network",
        run="forge_plugins_monitor.pages.command:docs",
    )
    yield Command(
        name="doctor",
        summary="look at this machine, or all of a job's: what is fine, what is not, what to do",
        run="forge_plugins_monitor.doctor.command:doctor",
    )
    yield Command(
        name="explain",
        summary="why a run stopped, what it has lost, and what to type next",
        run="forge_plugins_monitor.run_states.explain_command:explain",
    )
    yield Command(
        name="origins",
        summary="where each value of a configuration comes from: file and line, setting, default",
        run="forge_plugins_monitor.origins:origins",
    )
    yield Command(
        name="schema",
        summary="print the JSON Schema of what may stand in a configuration, for editors",
        run="forge_plugins_monitor.schema:schema",
    )
    yield Command(
        name="show",
        summary="one component: who provides it, and the keys of its table in a configuration",
        run="forge_plugins_monitor.show:show",
    )
    yield Command(
        name="report",
        summary="write one HTML page about runs: curves, events, differences of their configurations",
        run="forge_plugins_monitor.report.command:report",
    )
    yield Command(
        name="runs",
        summary="the runs in a folder: how far they are, how good, and what tells them apart",
        run="forge_plugins_monitor.run_states.listing:runs",
    )


@hookimpl
def forge_kinds() -> Iterable[Kind]:
    """The parts of the page of ``forge report``, and columns of ``forge runs``."""
    contract = "forge_plugins_monitor.report.section:ReportSection"
    yield Kind(
        name="report_section",
        hook="forge_report_sections",
        summary="a part of the page that forge report writes",
        contract=contract,
        returns=contract,
    )
    yield Kind(
        name="run_column",
        hook="forge_run_columns",
        summary="what forge runs says of runs beyond their own files",
        contract="forge_plugins_monitor.run_states.column:RunColumn",
    )


@hookimpl
def forge_report_sections() -> Iterable[Component]:
    """Ours, in the order of the page."""
    sections = {
        "summary": ("state, steps, losses and times of the runs", "summary:Summary"),
        "curves": ("loss, evaluations, learning rate, gradient norm, speed, memory", "curves:Curves"),
        "scaling": ("loss against compute of runs of different sizes, with a power law", "scaling:Scaling"),
        "sources": ("losses and tokens of the sources of a mixture", "curves:Sources"),
        "events": ("starts, ends, steps left out, rollbacks, failures", "incidents:Incidents"),
        "configurations": ("how the jobs of the runs differ, and each as a whole", "differences:Configurations"),
        "further_metrics": ("all other metrics, folded away", "curves:FurtherMetrics"),
    }
    for name, (summary, factory) in sections.items():
        yield Component(name=name, summary=summary, factory=f"forge_plugins_monitor.report.{factory}")
