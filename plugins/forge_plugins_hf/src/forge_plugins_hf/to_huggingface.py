"""A checkpoint as a folder that ``transformers`` reads, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from forge_core.checkpoint.store import Checkpoint
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.config_json import INCLUDE
from forge_plugins_hf.shards import Described, on_meta, write_shards
from forge_plugins_hf.tokenizer import give_tokenizer, special_tokens
from forge_plugins_hf.trained_model import TrainedModel, refuse_existing, written_whole
from forge_plugins_hf.weight_layout import Recipe
from forge_plugins_weights.loading import Weights

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def to_huggingface(
    checkpoint: Checkpoint,
    out: Path,
    dtype: torch.dtype | None,
    weights: Weights | None,
    catalog: Callable[[Collection[str]], Catalog],
    say: Callable[[str], None],
    architecture: str | None = None,
    include: Sequence[str] = (),
) -> str:
    """Write ``config.json``, safetensors, and the tokenizer's files into a new folder. Adapters are folded in.

    Args:
        dtype: of the parameters; ``None``: that of the checkpoint. Buffers are fp32, as ``transformers`` has them.
        weights: as ``TrainedModel.of`` takes them.
        say: is told where the architecture is not that of the model that was downloaded.
        architecture: as ``TrainedModel.of`` takes it.
        include: patterns of the parameters to write, such as ``model.vision.connector.*``; none: the whole model.

    Returns:
        The architecture.

    Raises:
        ConfigError: the model has no form in Hugging Face's format, there is something at ``out``, its disk has too
            little room, or a pattern of ``include`` means nothing.
        SaveError: it cannot be written.
    """
    refuse_existing(out)
    model = TrainedModel.of(checkpoint, weights, catalog, architecture)
    written = str(model.table["architectures"][0])
    if architecture is None and model.origin not in (None, written):
        say(f"note: the weights came from a {model.origin}, and are written as a {written}")
    kept = dtype or next((one for one in _NAMES if one in model.dtypes), torch.float32)
    shapes, tokenizer = model.shapes, checkpoint.path / "tokenizer"

    recipes = _included(model.recipes, include) if include else model.recipes

    def make(name: str) -> torch.Tensor:
        return recipes[name].make(*map(model.read, recipes[name].reads))

    def described_by(name: str, recipe: Recipe) -> Described:
        own = kept if model.buffers.isdisjoint(recipe.reads) else torch.float32
        return Described(name, recipe.make(*on_meta(shapes, recipe.reads)).shape, own)

    described = [described_by(name, recipe) for name, recipe in recipes.items()]
    tokens = special_tokens(tokenizer, model.state, model.origin_tokens)
    table = {**tokens, **model.table, "torch_dtype": _NAMES[kept], **({INCLUDE: [*include]} if include else {})}
    if "text_config" in table:
        table["text_config"] = {**tokens, **table["text_config"]}
    with written_whole(out, sum(one.n_bytes for one in described)) as folder:
        write_shards(folder, described, make)
        give_tokenizer(tokenizer, folder, model.state.get("tokenizer") or {})
        (folder / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return written


def _included(recipes: Mapping[str, Recipe], include: Sequence[str]) -> dict[str, Recipe]:
    """Those of tensors that are made of what the patterns mean."""
    meant = {
        name: {pattern for one in recipe.reads for pattern in include if fnmatchcase(f"model.{one}", pattern)}
        for name, recipe in recipes.items()
    }
    if idle := [pattern for pattern in include if not any(pattern in found for found in meant.values())]:
        known = sorted({f"model.{one}" for recipe in recipes.values() for one in recipe.reads})
        raise ConfigError(f"--include {idle[0]} means none of the model's parameters, such as {known[-1]}")
    return {name: recipe for name, recipe in recipes.items() if meant[name]}
