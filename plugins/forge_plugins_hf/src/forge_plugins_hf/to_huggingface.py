"""A checkpoint as a folder that ``transformers`` reads, a tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.checkpoint.store import Checkpoint
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError, SaveError
from forge_core.job import load_job
from forge_core.loading import Weights, build_within, with_multipliers
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.layouts import layout_of_model
from forge_plugins_hf.shards import Described, on_meta, write_shards
from forge_plugins_hf.tokenizer import give_tokenizer, special_tokens
from forge_plugins_hf.weight_layout import WeightLayout

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def to_huggingface(
    checkpoint: Checkpoint,
    out: Path,
    dtype: torch.dtype | None,
    weights: Weights | None,
    catalog: Callable[[Collection[str]], Catalog],
    architecture: str | None = None,
) -> str:
    """Write ``config.json``, safetensors, and the tokenizer's files into a new folder.

    Args:
        dtype: of the files; ``None``: that of the checkpoint.
        weights: the trained ones, or averages; ``None``: averages if there are any.
        architecture: the one to write; ``None``: that of the model that was converted, or the first that is equal.

    Returns:
        The architecture.

    Raises:
        ConfigError: the model has no form in Hugging Face's format, or there is something at ``out``.
        SaveError: it cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out, or remove it")
    job = load_job(checkpoint.path / "job.toml", ["callbacks=[]", "trackers=[]"], catalog=catalog)
    installed = catalog(job.plugins.disable)
    build = ComponentBuilder(installed)
    state = checkpoint.state()
    build_within(checkpoint, job, state["vocab_size"], build)  # refuses what does not fit it
    config = with_multipliers(job, build).config
    layout, table = _layout(config, state, installed, architecture)
    keys = _keys(checkpoint, weights)
    entries = checkpoint.saved_tensors()
    shapes = {name: torch.Size(entries[key].size) for name, key in keys.items()}
    recipes = layout.to_huggingface(config)
    if missing := sorted({name for recipe in recipes.values() for name in recipe.reads} - keys.keys()):
        raise ConfigError(f"{checkpoint.path} has no tensor {missing[0]}, which a conversion needs")
    stored = {entry.properties.dtype for key, entry in entries.items() if key in keys.values()}
    kept = dtype or next((one for one in _NAMES if one in stored), torch.float32)

    def read(name: str) -> torch.Tensor:
        entry = entries[keys[name]]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        checkpoint.load({keys[name]: tensor})
        return tensor

    def make(name: str) -> torch.Tensor:
        return recipes[name].make(*(read(one) for one in recipes[name].reads))

    described = [
        Described(name, recipe.make(*on_meta(shapes, recipe.reads)).shape, kept) for name, recipe in recipes.items()
    ]
    table = {**special_tokens(checkpoint.path / "tokenizer", state), **table, "torch_dtype": _NAMES[kept]}
    _write(out, described, make, table, _tokenizer(checkpoint, state))
    return str(table["architectures"][0])


def _layout(
    config: Any, state: Mapping[str, Any], catalog: Catalog, architecture: str | None
) -> tuple[WeightLayout, dict[str, Any]]:
    """The layout that is asked for; or that of the model that was converted, if ours is still equal to it."""
    origin = (state.get("converted") or {}).get("architecture")
    if architecture is None and origin is not None:
        try:
            return layout_of_model(config, state["vocab_size"], catalog, origin)
        except ConfigError:
            pass  # it was trained further with other keys
    return layout_of_model(config, state["vocab_size"], catalog, architecture)


def _keys(checkpoint: Checkpoint, weights: Weights | None) -> dict[str, str]:
    """The key of each tensor of the model, by its name."""
    keys = {key.removeprefix("model."): key for key in checkpoint.saved_tensors() if key.startswith("model.")}
    averages = {
        key.removeprefix("evaluation."): key for key in checkpoint.saved_tensors() if key.startswith("evaluation.")
    }
    if weights == "evaluation" and not averages:
        raise ConfigError(f"--weights evaluation: {checkpoint.path} has the trained ones alone; leave it out")
    return keys if weights == "training" else keys | averages


def _tokenizer(checkpoint: Checkpoint, state: Mapping[str, Any]) -> Callable[[Path], None]:
    end = (state.get("tokenizer") or {}).get("end_of_document")

    def write(out: Path) -> None:
        give_tokenizer(checkpoint.path / "tokenizer", out, end)

    return write


def _write(
    out: Path,
    described: list[Described],
    make: Callable[[str], torch.Tensor],
    table: Mapping[str, Any],
    write_tokenizer: Callable[[Path], None],
) -> None:
    """All of it, or nothing."""
    unfinished = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        needed, free = sum(one.n_bytes for one in described), shutil.disk_usage(unfinished).free
        if needed > free:
            raise SaveError(f"{out} needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free there")
        write_shards(unfinished, described, make)
        write_tokenizer(unfinished)
        (unfinished / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(out)
    except OSError as error:
        raise SaveError(f"cannot write {error.filename or out}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
