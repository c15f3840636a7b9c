"""A downloaded model's folder: its layout, its ``[model]``, its weights, and how ours are made of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.config_json import ReadKeys, architecture_in, refuse_unread
from forge_plugins_hf.float8_shards import open_shards
from forge_plugins_hf.layouts import layout_of_architecture
from forge_plugins_hf.quantisation import read_quantisation
from forge_plugins_hf.shards import Shards
from forge_plugins_hf.weight_layout import Recipe, WeightLayout

_HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of the name of a head. A model that ties it to its embedding has none."""
_ROWS = 2**12
"""Of two matrices that are compared at a time: some 130 MiB of a vocabulary's in fp32."""


def layout_in(config: ReadKeys, folder: Path, catalog: Catalog, say: Callable[[str], None]) -> WeightLayout:
    """The layout of a folder's architecture. Code that the model brings along is not run, and this is said.

    Raises:
        ConfigError: no installed package has it.
    """
    architecture = architecture_in(config, folder)
    own_code = f"{folder / 'config.json'}: auto_map names code that the model brings with it, which is never run"
    try:
        layout = layout_of_architecture(architecture, catalog)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{own_code}" if "auto_map" in config else str(error)) from error
    if "auto_map" in config:
        say(f"note: {own_code}; our own {architecture} takes the weights")
    return layout


def table_of(layout: WeightLayout, config: ReadKeys, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The table ``[model]`` of a folder's ``config.json``.

    Raises:
        ConfigError: a key is missing, or one says what our model has not; or a file beside it does.
    """
    where = folder / "config.json"
    try:
        table = layout.model_table(config)
    except KeyError as error:
        raise ConfigError(f"{where}: {architecture_in(config, folder)} needs the key {error.args[0]}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:  # JSON has no types
        last, value = config.last
        raise ConfigError(
            f"{where} has a value that {architecture_in(config, folder)} cannot have; the key that was read last is "
            f"{last} = {value!r} ({type(error).__name__}: {error})"
        ) from error
    if left_out := [f"{key} = {config[key]}" for key in layout.training_only if config.get(key)]:
        say(f"{where}: {', '.join(left_out)} is left out; our model trains without")
    read_quantisation(config, layout, folder)
    refuse_unread(config, folder)
    if sentence := layout.misfit(table, folder):
        raise ConfigError(sentence)
    return table


def weights_in(
    folder: Path, config: ReadKeys, layout: WeightLayout, dtype: torch.dtype, say: Callable[[str], None]
) -> Shards:
    """The weights of a folder. What is in float8 comes out in another dtype, and this is said.

    Args:
        dtype: of what was in float8.

    Raises:
        ConfigError: files are not whole, or are stored in a way that we do not read.
    """
    blocks = read_quantisation(config, layout, folder)
    if blocks is not None:
        say(
            f"note: {folder / 'config.json'}: weights in fp8 are multiplied by their factors; what is written of them, "
            "here and for Hugging Face, has no quantization_config"
        )
    return open_shards(folder, blocks, dtype)


def recipes_in(
    folder: Path, layout: WeightLayout, config: Any, shards: Shards, left_out: Collection[str] = ()
) -> Mapping[str, Recipe]:
    """How each tensor of our model is made of those of a folder.

    Args:
        config: our model's.
        left_out: names of tensors that the user does without.

    Raises:
        ConfigError: tensors are missing or left over, or belong to a part that our model has not; or there is a head
            where ``config.json`` says that it is the embedding, or none where it says otherwise.
    """
    where = folder / "config.json"
    names = [name for name in shards.names if name not in left_out]
    _refuse_foreign(folder, layout, names)
    heads = [name for name in names if name.endswith(_HEADS)]
    try:
        recipes = layout.to_forge(config, names)
    except ConfigError as error:
        is_headless = not heads and getattr(config, "tie_embeddings", None) is False
        hint = "; tie_word_embeddings is false, set it to true if the head is the embedding" if is_headless else ""
        raise ConfigError(f"{where} and the tensors in its folder do not agree: {error}{hint}") from error
    read = {name for recipe in recipes.values() for name in recipe.reads}
    embedding = recipes.get("embed.weight")
    for head in heads:
        if head not in read and embedding is not None:
            _refuse_another_head(where, head, embedding.reads[0], shards)
    return recipes


def _refuse_foreign(folder: Path, layout: WeightLayout, names: Collection[str]) -> None:
    """
    Raises:
        ConfigError: there are tensors of parts that our model has not. The sentence has the command that converts the
            others.
    """
    if found := {pattern: n for pattern in layout.foreign if (n := len(fnmatch.filter(names, pattern)))}:
        counts = ", ".join(f"{pattern} ({n})" for pattern, n in found.items())
        options = " ".join(f"--leave-out {pattern!r}" for pattern in found)
        raise ConfigError(
            f"{folder} has {sum(found.values())} tensors of parts that our model has not: {counts}. "
            f"forge convert {folder} --to forge --out OUT {options} converts the others"
        )


def _refuse_another_head(where: Path, head: str, embedding: str, shards: Shards) -> None:
    """``transformers`` 5 computes with such a head, and does not tie it.

    Raises:
        ConfigError: it has other values than the embedding.
    """
    n_rows, _ = shards.shape(head)
    pieces = [(slice(first, min(first + _ROWS, n_rows)),) for first in range(0, n_rows, _ROWS)]
    if shards.shape(head) != shards.shape(embedding) or not all(
        (shards.read(head, piece) == shards.read(embedding, piece)).all() for piece in pieces
    ):
        raise ConfigError(
            f"{where}: tie_word_embeddings = true, and {head} is not equal to {embedding}; set it to false to keep the "
            "head, as transformers 5 does, or take the tensor out of the file"
        )
