"""A downloaded model as a checkpoint, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from forge_core.checkpoint.export import model_tensors, module_versions, named_parameters, write_checkpoint
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.errors import ConfigError, and_more
from forge_core.job import dump_job, load_job
from forge_core.loading import build_on_meta
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.config_json import INCLUDE, ReadKeys, architecture_in, read_config, refuse_unread
from forge_plugins_hf.float8_shards import open_shards
from forge_plugins_hf.layouts import layout_of_architecture
from forge_plugins_hf.quantisation import read_quantisation
from forge_plugins_hf.shards import Shards, on_meta
from forge_plugins_hf.tokenizer import FILE, choose_tokenizer, keep_tokenizer, token_ids
from forge_plugins_hf.weight_layout import Recipe, WeightLayout

CHECKPOINT, CONFIG = "checkpoint", "train.toml"
_SEQ_LEN = 2048


def to_forge(
    folder: Path,
    out: Path,
    dtype: torch.dtype,
    catalog: Callable[[Collection[str]], Catalog],
    say: Callable[[str], None],
    *,
    config_only: bool = False,
) -> tuple[str, int]:
    """Write ``out/checkpoint/``, which ``forge generate`` and ``forge eval`` take, and ``out/train.toml``, a run that
    begins with its weights.

    Args:
        folder: with ``config.json``, safetensors and, if there is one, ``tokenizer.json``.
        dtype: of the checkpoint.
        say: is told of keys that are left out.
        config_only: write ``out/train.toml`` alone, for a run that reads the folder itself.

    Returns:
        The architecture, and how many parameters the model has.

    Raises:
        ConfigError: the model is not one that we have, or its files are not whole.
        SaveError: it cannot be written.
    """
    for path in (out / CHECKPOINT, out / CONFIG):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another --out, or remove it")
    installed = catalog(())
    config = ReadKeys(read_config(folder))
    architecture = architecture_in(config, folder)
    layout = layout_in(config, folder, installed, say)
    table = table_of(layout, config, folder, say)
    if INCLUDE in config:
        raise ConfigError(
            f"{folder} has {', '.join(config[INCLUDE])} alone, which is no model; give it to a run as "
            "[[checkpoint.load]] path"
        )
    tokenizer = choose_tokenizer(folder, config, table["vocab_size"])
    kept = folder if config_only else out / CHECKPOINT / "tokenizer"
    data = layout.data_table(config, token_ids(folder / FILE))
    job = _job(table, data, tokenizer, kept / FILE, out, installed)
    model: Any = build_on_meta(job, table["vocab_size"], ComponentBuilder(installed))
    shapes = {key.removeprefix("model."): one for key, one in model_tensors(named_parameters([model]), [model]).items()}
    shards = weights_in(folder, config, layout, dtype, say)
    recipes = layout.to_forge(job.model.config, shards.names)
    _refuse_misfits(shards, recipes, shapes)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    if config_only:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).write_text(_train_toml(job, folder), encoding="utf-8")
        return architecture, n_parameters

    def make(key: str) -> torch.Tensor:
        recipe, like = recipes[key.removeprefix("model.")], shapes[key.removeprefix("model.")]
        made = recipe.make(*(shards.read(name) for name in recipe.reads))
        return made.to(dtype if like.is_floating_point() else like.dtype)

    def write_more(unfinished: Path) -> None:
        (unfinished / "job.toml").write_text(dump_job(job), encoding="utf-8")
        if tokenizer is not None:
            keep_tokenizer(folder, unfinished / "tokenizer")

    saved = {"tokenizer": {**tokenizer, "path": FILE}} if tokenizer is not None else {}
    write_checkpoint(
        out / CHECKPOINT,
        {
            f"model.{name}": torch.empty(
                one.shape, dtype=dtype if one.is_floating_point() else one.dtype, device="meta"
            )
            for name, one in shapes.items()
        },
        make,
        state={
            "step": 0,
            "vocab_size": table["vocab_size"],
            "modules": module_versions([model]),
            "converted": {"source": str(folder.resolve()), "architecture": architecture},
            **saved,
        },
        step=0,
        tokens=0,
        versions={
            "forge-core": version("forge-core"),
            "torch": str(torch.__version__),
            **{plugin.distribution: plugin.version for plugin in installed.plugins if plugin.status == "ok"},
        },
        write_more=write_more,
    )
    (out / CONFIG).write_text(_train_toml(job, out / CHECKPOINT), encoding="utf-8")
    return architecture, n_parameters


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
    try:
        table = layout.model_table(config)
    except KeyError as error:
        raise ConfigError(
            f"{folder / 'config.json'}: {layout.architectures[0]} needs the key {error.args[0]}"
        ) from error
    if left_out := [f"{key} = {config[key]}" for key in layout.training_only if config.get(key)]:
        say(f"{folder / 'config.json'}: {', '.join(left_out)} is left out; our model trains without")
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


def _job(
    table: Mapping[str, Any],
    text: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None,
    kept: Path,
    out: Path,
    catalog: Catalog,
) -> Job:
    """A job to go on from, whose data are the user's to choose.

    Args:
        text: keys of ``[data]``, where there is a tokenizer.
        kept: the tokenizer's file, as the run is to read it.
    """
    import tomli_w

    data: dict[str, Any] = {"name": "token_files", "path": "tokens"}
    if tokenizer is not None:
        own = {**tokenizer, "path": str(kept.absolute())}
        data = {"path": "text", **text, "tokenizer": own}
    job = {
        "model": dict(table),
        "data": data,
        "train": {"steps": 1000, "seq_len": min(_SEQ_LEN, table.get("max_seq_len", _SEQ_LEN))},
        "optimizer": {"name": "adamw", "lr": 1e-5},
    }
    with TemporaryDirectory() as name:
        file = Path(name) / f"{out.absolute().name}.toml"
        file.write_text(tomli_w.dumps(job), encoding="utf-8")
        return load_job(file, catalog=catalog)


def _train_toml(job: Job, weights: Path) -> str:
    load = f"[checkpoint.load]\npath = {str(weights.absolute())!r}\n"
    return f"# Weights of a converted model; [data] is to be chosen.\n\n{dump_job(job)}\n{load}"


def _refuse_misfits(shards: Shards, recipes: Mapping[str, Recipe], shapes: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        ConfigError: tensors have other shapes than the model that ``config.json`` describes.
    """
    there = {name: shards.shape(name) for recipe in recipes.values() for name in recipe.reads}
    wrong = []
    for name, like in shapes.items():
        recipe = recipes[name]
        try:
            made = recipe.make(*on_meta(there, recipe.reads)).shape
        except RuntimeError:  # of tensors that cannot be put together
            made = None
        if made != like.shape:
            read = ", ".join(f"{one} {tuple(there[one])}" for one in recipe.reads[:2])
            wrong.append(f"{read} (ours is {tuple(like.shape)})")
    if wrong:
        raise ConfigError(
            "weights have other shapes than config.json says: " + "; ".join(wrong[:5]) + and_more(len(wrong), 5, "; ")
        )
