"""Small components of every shape that a configuration can have, and a catalog of them that needs no installation."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
import pytest
from attrs.validators import and_, deep_iterable, ge, gt, in_, lt, matches_re, max_len, min_len, optional, or_

from forge_core.api import Component, ComponentRef, PassComponent, Slot
from forge_core.config.sections import Job
from forge_core.job import load_job
from forge_core.registry.catalog import Catalog, Plugin

if TYPE_CHECKING:
    from collections.abc import Iterable


class Mode(enum.StrEnum):
    FAST = "fast"
    EXACT = "exact"


def _divides_dim(config: DecoderConfig, _: attrs.Attribute[int], value: int) -> None:
    if config.dim % value:
        raise ValueError(f"must divide dim = {config.dim}, got {value}")


def _divides_n_heads(config: DecoderConfig, _: attrs.Attribute[int], value: int) -> None:
    if config.n_heads % value:
        raise ValueError(f"must divide n_heads = {config.n_heads}, got {value}")


@attrs.frozen(kw_only=True)
class Scaling:
    factor: float = attrs.field(default=8.0, validator=gt(1))
    """How much longer."""


@attrs.frozen(kw_only=True)
class DecoderConfig:
    dim: int = attrs.field(validator=gt(0))
    """Width."""
    n_heads: int = attrs.field(default=8, validator=[gt(0), _divides_dim])
    n_kv_heads: int = attrs.field(
        default=attrs.Factory(lambda config: config.n_heads, takes_self=True), validator=[gt(0), _divides_n_heads]
    )
    max_seq_len: int = attrs.field(default=1024, validator=gt(0))
    tie_embeddings: bool = False
    window: int | None = attrs.field(default=None, validator=optional(gt(0)))
    scaling: Scaling | None = None
    feed_forward: Annotated[ComponentRef, Slot("feed_forward", default="mlp")]

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        if job.train.seq_len > self.max_seq_len:
            yield "max_seq_len", f"{self.max_seq_len} is shorter than train.seq_len = {job.train.seq_len}"


@attrs.frozen(kw_only=True)
class MLPConfig:
    multiplier: float = 4.0


@attrs.frozen(kw_only=True)
class MoEConfig:
    n_experts: int = attrs.field(default=8, validator=gt(0))
    router: Annotated[ComponentRef, Slot("router")]

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        if self.n_experts % job.parallel.ep:
            yield "n_experts", f"{self.n_experts} experts cannot be shared out to parallel.ep = {job.parallel.ep} ranks"


@attrs.frozen(kw_only=True)
class TopKConfig:
    k: int = attrs.field(default=2, validator=gt(0))
    """How many experts each token visits."""
    noise: float = attrs.field(default=1.0, validator=ge(0))


@attrs.frozen(kw_only=True)
class GroupConfig:
    pattern: str = attrs.field(validator=min_len(1))
    lr_scale: float | None = None


@attrs.frozen(kw_only=True)
class AdamWConfig:
    lr: float = attrs.field(validator=gt(0))
    """Learning rate."""
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=deep_iterable(and_(ge(0), lt(1))))
    state: Literal["fp32", "bf16"] = "fp32"
    groups: tuple[GroupConfig, ...] = ()


@attrs.frozen(kw_only=True)
class MuonConfig:
    lr: float = attrs.field(default=0.02, validator=gt(0))
    momentum: float = attrs.field(default=0.95, validator=[ge(0), lt(1)])


@attrs.frozen(kw_only=True)
class Empty:
    """Nothing to choose."""


@attrs.frozen(kw_only=True)
class CosineConfig:
    warmup_steps: int = attrs.field(default=0, validator=ge(0))


@attrs.frozen(kw_only=True)
class TextConfig:
    path: Path
    pattern: str = "*.txt"
    weights: Mapping[str, float] = attrs.field(factory=dict)
    suffixes: frozenset[str] = frozenset()
    mode: Mode = Mode.FAST
    files: str | tuple[str, ...] = ()
    tokenizer: Annotated[ComponentRef, Slot("tokenizer", default="bytes")]


@attrs.frozen(kw_only=True)
class FsdpConfig:
    reshard: bool = True
    degree: int = attrs.field(default=-1, validator=or_(in_([-1]), gt(0)))


@attrs.frozen(kw_only=True)
class ProgressConfig:
    interval: int = attrs.field(default=10, validator=gt(0))
    title: str = attrs.field(default="run", validator=[max_len(8), matches_re("[a-z]+")])


@attrs.frozen(kw_only=True)
class CrashingConfig:
    def check(self, job: Job) -> Iterator[tuple[str, str]]:
        raise KeyError("oops")


@attrs.frozen(kw_only=True)
class ReviewedConfig:
    check: bool = True
    notes: str = ""
    expand: int = 1


@attrs.frozen(kw_only=True)
class NamedConfig:
    name: str = "mine"


@attrs.frozen(kw_only=True)
class UnresolvableConfig:
    mesh: Unknown | None = None  # type: ignore[name-defined]  # noqa: F821  # this is what it is for


@attrs.frozen(kw_only=True)
class UnwritableConfig:
    phase: Any = 1j


@attrs.frozen(kw_only=True)
class GapConfig:
    widths: tuple[int | None, ...] = (None, 3)


@attrs.frozen(kw_only=True)
class NumberedConfig:
    names: dict[int, str] = attrs.field(factory=lambda: {1: "one"})


@attrs.frozen(kw_only=True)
class FailingConfig:
    size: int = attrs.field(factory=lambda: 1 // 0)


not_a_class = "a string"


def component(name: str, config: str = "Empty", cls: type[Component] = Component, **more: Any) -> Component:
    reference = config if ":" in config else f"{__name__}:{config}"
    return cls(name=name, summary=f"the {name}", factory="builtins:dict", config=reference, **more)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    standard = (
        ("model", component("decoder", "DecoderConfig")),
        ("feed_forward", component("mlp", "MLPConfig")),
        ("optimizer", component("adamw", "AdamWConfig")),
        ("optimizer", component("adam-w", "AdamWConfig", deprecated="use 'adamw'")),
        ("scheduler", component("constant")),
        ("scheduler", component("cosine", "CosineConfig")),
        ("loss", component("cross_entropy")),
        ("data_source", component("text", "TextConfig")),
        ("tokenizer", component("bytes")),
        (
            "parallel_pass",
            component("fsdp", "FsdpConfig", PassComponent, phase="fsdp", serves=("dp_replicate", "dp_shard", "ep")),
        ),
        ("parallel_pass", component("compile", cls=PassComponent, phase="compile")),
        ("warm_start", component("tensors")),
        ("callback", component("progress", "ProgressConfig")),
        ("callback", component("crashing", "CrashingConfig")),
        ("callback", component("reviewed", "ReviewedConfig")),
        ("callback", component("named", "NamedConfig")),
    )
    moe = (
        ("feed_forward", component("moe", "MoEConfig")),
        ("router", component("topk", "TopKConfig")),
        ("router", component("hash")),
    )
    acme = (
        ("router", component("topk", "TopKConfig")),
        ("router", component("gone", "forge_core.errors:Gone")),
        ("router", component("not_a_class", "not_a_class")),
        ("router", component("unresolvable", "UnresolvableConfig")),
        ("router", component("unwritable", "UnwritableConfig")),
        ("router", component("gap", "GapConfig")),
        ("router", component("numbered", "NumberedConfig")),
        ("router", component("failing", "FailingConfig")),
        ("optimizer", component("muon", "MuonConfig")),
    )
    return Catalog(
        [
            Plugin(distribution="standard", version="1.0", components=standard),
            Plugin(distribution="forge-moe", version="0.3.1", components=moe),
            Plugin(distribution="acme-routers", version="2.0", components=acme),
            Plugin(distribution="lost", version="0.1", status="broken", reason="ModuleNotFoundError: No module 'x'"),
        ]
    )


GOOD = """\
[model]
name = "decoder"
dim = 64

[data]
name = "text"
path = "corpus"

[train]
steps = 10
seq_len = 128
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file into the working directory of the test, and gives back its relative name as a user would."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = GOOD, name: str = "job.toml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def load(write: Callable[..., Path], catalog: Catalog) -> Callable[..., Job]:
    """Loads a configuration from its text, or the working one with overrides."""

    def load(*overrides: str, text: str = GOOD, world_size: int | None = None) -> Job:
        return load_job(write(text), overrides, catalog=catalog, world_size=world_size)

    return load


@pytest.fixture
def complaint(load: Callable[..., Job]) -> Callable[..., str]:
    """The message about a configuration that is wrong."""
    from forge_core.errors import ConfigError

    def complaint(*overrides: str, text: str = GOOD, world_size: int | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*overrides, text=text, world_size=world_size)
        return str(caught.value)

    return complaint
