"""The model in a checkpoint, as a conversion reads it, and the folder that is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from forge_core.checkpoint.fsync import flush, flush_tree
from forge_core.checkpoint.manifest import lack_of_room
from forge_core.checkpoint.store import Checkpoint
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.parallel_pass import Folded
from forge_core.errors import ConfigError, SaveError
from forge_core.job import catalog_of, load_job
from forge_core.registry.catalog import Catalog
from forge_core.train.parametrization import with_multipliers
from forge_plugins_hf.layouts import layout_of_model
from forge_plugins_hf.tokenizer import FILE, special_tokens_in, token_ids
from forge_plugins_hf.weight_layout import Recipe, WeightLayout
from forge_plugins_weights.loading import Weights, build_within, folded_weights


@attrs.frozen
class TrainedModel:
    """The tensors of a checkpoint by the names that they have in the model, and the layout to write them in."""

    checkpoint: Checkpoint
    job: Job
    state: Mapping[str, Any]
    table: Mapping[str, Any]
    """The content of ``config.json``."""
    layout: WeightLayout
    recipes: Mapping[str, Recipe]
    """How each of their tensors is made of ours."""
    folded: Mapping[str, Folded]
    """The weights that passes have added parameters to."""
    buffers: frozenset[str]
    """Tensors that are no parameters, such as the biases by which experts are chosen."""
    origin: str | None
    """The architecture of the model that was downloaded, if that can be found out."""
    origin_tokens: Mapping[str, Any]
    """The ids of special tokens that its ``config.json`` had."""
    _keys: Mapping[str, str]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        weights: Weights | None,
        catalog: Callable[[Collection[str]], Catalog],
        architecture: str | None,
    ) -> TrainedModel:
        """Read no tensor.

        Args:
            weights: the trained ones, or averages; ``None``: averages if there are any.
            architecture: the one to write; ``None``: that of the model that was downloaded, or the first that is equal.

        Raises:
            ConfigError: the model has no form in Hugging Face's format, or the checkpoint has no such weights.
        """
        job = load_job(checkpoint.path / "job.toml", ["callbacks=[]", "trackers=[]"], catalog=catalog)
        installed = catalog_of(job, catalog)
        build = ComponentBuilder(installed)
        state = checkpoint.state()
        own = build_within(checkpoint, job, state["vocab_size"], build)  # refuses what does not fit it
        config = with_multipliers(job, build).config
        origin, tokens = _origin(job, state)
        layout, table = _layout(config, state["vocab_size"], origin, installed, architecture)
        table = layout.with_data(table, job.data.config, token_ids(checkpoint.path / "tokenizer" / FILE))
        keys, recipes = _keys(checkpoint, weights), layout.to_huggingface(config)
        if missing := sorted({name for recipe in recipes.values() for name in recipe.reads} - keys.keys()):
            raise ConfigError(f"{checkpoint.path} has no tensor {missing[0]}, which a conversion needs")
        folded = folded_weights(job, checkpoint, build, installed)
        buffers = frozenset(name for name, _ in own.named_buffers())
        return cls(checkpoint, job, state, table, layout, recipes, folded, buffers, origin, tokens, keys)

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of all tensors, by name."""
        entries = self.checkpoint.saved_tensors()
        return {name: torch.Size(entries[key].size) for name, key in self._keys.items()}

    @property
    def dtypes(self) -> set[torch.dtype]:
        """All that parameters have."""
        entries = self.checkpoint.saved_tensors()
        return {entries[key].properties.dtype for name, key in self._keys.items() if name not in self.buffers}

    def stored(self, name: str) -> torch.Tensor:
        """A tensor, whole, on the CPU."""
        return self.checkpoint.read(self._keys[name])

    def read(self, name: str) -> torch.Tensor:
        """Same as ``stored``, with what passes have added to it."""
        if (folded := self.folded.get(name)) is None:
            return self.stored(name)
        return folded.make(*map(self.stored, folded.reads))


@contextmanager
def written_whole(out: Path, n_bytes: int) -> Iterator[Path]:
    """A folder to write to, which is flushed and becomes ``out`` at the end, or is removed.

    Raises:
        ConfigError: its disk has too little room; nothing has been written.
        SaveError: it cannot be written.
    """
    unfinished = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        if lack := lack_of_room(out.parent, n_bytes, "the model"):
            raise ConfigError(lack)
        unfinished.mkdir(parents=True)
        yield unfinished
        flush_tree(unfinished)
        unfinished.rename(out)
        flush(out.parent)
    except OSError as error:
        raise SaveError(f"cannot write {error.filename or out}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """
    Raises:
        ConfigError: there is something at ``out``.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out, or remove it")


def _origin(job: Job, state: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The architecture of the downloaded model that it was, and its ids of special tokens, as far as these can be found
    out: a folder that a run began with may be gone."""
    tables: list[tuple[Any, Callable[[Any], tuple[Any, Any]]]] = [(state, _of_checkpoint)]
    for load in job.checkpoint.loads:
        folder = load.path.expanduser()
        tables += [(folder / "config.json", _of_config), (folder / "state.json", _of_checkpoint)]
    for table, origin_in in tables:
        try:
            found, tokens = origin_in(json.loads(table.read_text("utf-8")) if isinstance(table, Path) else table)
            return str(found), dict(tokens)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a stranger may have written it
            continue
    return None, {}


def _of_config(table: Any) -> tuple[Any, Any]:
    return table["architectures"][0], special_tokens_in(table)


def _of_checkpoint(table: Any) -> tuple[Any, Any]:
    return table["converted"]["architecture"], table["converted"].get("special_tokens", {})


def _layout(
    config: Any, vocab_size: int, origin: str | None, catalog: Catalog, architecture: str | None
) -> tuple[WeightLayout, dict[str, Any]]:
    """The layout that is asked for; or that of the model that was downloaded, if ours is still equal to it."""
    if architecture is None and origin is not None:
        try:
            return layout_of_model(config, vocab_size, catalog, origin)
        except ConfigError:
            pass  # it was trained further with other keys
    return layout_of_model(config, vocab_size, catalog, architecture)


def _keys(checkpoint: Checkpoint, weights: Weights | None) -> dict[str, str]:
    """The key of each tensor of the model, by its name."""
    keys = {key.removeprefix("model."): key for key in checkpoint.saved_tensors() if key.startswith("model.")}
    averages = {
        key.removeprefix("evaluation."): key for key in checkpoint.saved_tensors() if key.startswith("evaluation.")
    }
    if weights == "evaluation" and not averages:
        raise ConfigError(f"--weights evaluation: {checkpoint.path} has the trained ones alone; leave it out")
    return keys if weights == "training" else keys | averages
