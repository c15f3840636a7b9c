"""A downloaded model as a checkpoint, a tensor at a time."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch

from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.checkpoint.upgrading import module_versions
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.errors import ConfigError, and_more
from forge_core.job import dump_job, load_job
from forge_core.registry.catalog import Catalog
from forge_core.train.build import build_on_meta
from forge_plugins_hf.config_json import INCLUDE, ReadKeys, architecture_in, read_config
from forge_plugins_hf.model_folder import layout_in, recipes_in, table_of, weights_in
from forge_plugins_hf.shards import Shards, on_meta
from forge_plugins_hf.tokenizer import FILE, choose_tokenizer, keep_tokenizer, special_tokens_in, token_ids
from forge_plugins_hf.weight_layout import Recipe, WeightLayout
from forge_plugins_weights.export import versions_of, write_checkpoint

CHECKPOINT, CONFIG = "checkpoint", "train.toml"
_SEQ_LEN = 2048


def to_forge(
    folder: Path,
    out: Path,
    dtype: torch.dtype,
    catalog: Catalog,
    say: Callable[[str], None],
    *,
    config_only: bool = False,
    leave_out: Sequence[str] = (),
) -> tuple[str, int]:
    """Write ``out/checkpoint/``, which ``forge generate`` and ``forge eval`` take, and ``out/train.toml``, a run that
    begins with its weights.

    Args:
        folder: with ``config.json``, safetensors and, if there is one, ``tokenizer.json``.
        dtype: of the parameters: fp32, or bf16 for ``train.precision = "bf16_pure"``, which the job then has.
        say: is told of keys and tensors that are left out.
        config_only: write ``out/train.toml`` alone, for a run that reads the folder itself.
        leave_out: patterns of names of tensors to do without, such as ``vision_tower.*``.

    Returns:
        The architecture, and how many parameters the model has.

    Raises:
        ConfigError: the model is not one that we have, its files are not whole, a pattern fits no tensor, or the disk
            has too little room.
        SaveError: it cannot be written.
    """
    for path in (out / CHECKPOINT, out / CONFIG):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another --out, or remove it")
    theirs = _Described.of(folder, catalog, say)
    weights, kept = (folder, folder) if config_only else (out / CHECKPOINT, out / CHECKPOINT / "tokenizer")
    job = theirs.job(out.absolute().name, kept, catalog, is_pure=dtype == torch.bfloat16)
    model: Any = build_on_meta(job, theirs.vocab_size, ComponentBuilder(catalog))
    shapes = model_tensors(named_parameters([model]), [model])
    shards = weights_in(folder, theirs.config, theirs.layout, dtype, say)
    left_out = _left_out(shards.names, leave_out, folder)
    by_name = recipes_in(folder, theirs.layout, job.model.config, shards, left_out.keys())
    recipes = {key: by_name[key.removeprefix("model.")] for key in shapes}
    _refuse_misfits(shards, recipes, shapes)
    for pattern in leave_out:
        say(f"{folder}: {[*left_out.values()].count(pattern)} tensors are left out by --leave-out {pattern!r}")

    def make(key: str) -> torch.Tensor:
        made = recipes[key].make(*(shards.read(name) for name in recipes[key].reads))
        return made.to(shapes[key].dtype)

    def write_more(unfinished: Path) -> None:
        (unfinished / "job.toml").write_text(dump_job(job), encoding="utf-8")
        if theirs.tokenizer is not None:
            keep_tokenizer(folder, unfinished / "tokenizer")

    if config_only:
        out.mkdir(parents=True, exist_ok=True)
    else:
        state = theirs.state(model)
        versions = versions_of(catalog)
        write_checkpoint(weights, shapes, make, state=state, step=0, tokens=0, versions=versions, write_more=write_more)
    (out / CONFIG).write_text(_train_toml(job, weights), encoding="utf-8")
    return theirs.architecture, sum(parameter.numel() for parameter in model.parameters())


@attrs.frozen
class _Described:
    """A downloaded model, by its ``config.json`` and the files of its tokenizer."""

    folder: Path
    config: ReadKeys
    architecture: str
    layout: WeightLayout
    table: Mapping[str, Any]
    """Our ``[model]``."""
    tokenizer: Mapping[str, Any] | None

    @classmethod
    def of(cls, folder: Path, catalog: Catalog, say: Callable[[str], None]) -> _Described:
        """
        Raises:
            ConfigError: it is no model that we have, or no whole one.
        """
        config = ReadKeys(read_config(folder))
        architecture = architecture_in(config, folder)
        layout = layout_in(config, folder, catalog, say)
        table = table_of(layout, config, folder, say)
        if INCLUDE in config:
            raise ConfigError(
                f"{folder} has {', '.join(config[INCLUDE])} alone, which is no model; give it to a run as "
                "[[checkpoint.load]] path"
            )
        tokenizer = choose_tokenizer(folder, config, table["vocab_size"])
        return cls(folder, config, architecture, layout, table, tokenizer)

    @property
    def vocab_size(self) -> int:
        return int(self.table["vocab_size"])

    def job(self, name: str, kept: Path, catalog: Catalog, *, is_pure: bool) -> Job:
        """Make a job to go on from, whose data are the user's to choose.

        Args:
            name: of its run.
            kept: the folder that it reads the tokenizer from.
            is_pure: parameters are in bf16.

        Raises:
            ConfigError: our model refuses a value.
        """
        import tomli_w

        data: dict[str, Any] = {"name": "token_files", "path": "tokens"}
        text = self.layout.data_beside(self.layout.data_table(self.config, token_ids(self.folder / FILE)), self.folder)
        if self.tokenizer is not None:
            data = {"path": "text", **text, "tokenizer": {**self.tokenizer, "path": str((kept / FILE).absolute())}}
        job = {
            "model": dict(self.table),
            "data": data,
            "train": {"steps": 1000, "seq_len": min(_SEQ_LEN, self.table.get("max_seq_len", _SEQ_LEN))}
            | ({"precision": "bf16_pure"} if is_pure else {}),
            "optimizer": {"name": "adamw", "lr": 1e-5},
        }
        with TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.toml"
            file.write_text(tomli_w.dumps(job), encoding="utf-8")
            try:
                return load_job(file, catalog=catalog)
            except ConfigError as error:  # which begins with a file and a line that the user has never seen
                sentence = re.sub(r"^\S*\.toml(:\d+)?: ", "", str(error), flags=re.MULTILINE)
                raise ConfigError(f"{self.folder / 'config.json'} means a model that is refused: {sentence}") from error

    def state(self, model: torch.nn.Module) -> dict[str, Any]:
        """The state of a run at step 0, which goes with a checkpoint."""
        converted = {
            "source": str(self.folder.resolve()),
            "architecture": self.architecture,
            "special_tokens": special_tokens_in(self.config),
        }
        state = {"step": 0, "vocab_size": self.vocab_size, "modules": module_versions([model]), "converted": converted}
        return state if self.tokenizer is None else {**state, "tokenizer": {**self.tokenizer, "path": FILE}}


def _left_out(names: Collection[str], patterns: Sequence[str], folder: Path) -> dict[str, str]:
    """The first pattern that fits, by the name of the tensor.

    Raises:
        ConfigError: a pattern fits no tensor that the ones before it leave.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        fits = [name for name in fnmatch.filter(names, pattern) if name not in found]
        if not fits:
            raise ConfigError(
                f"--leave-out {pattern!r} fits no tensor of {folder} that is still there; it has {min(names)}, …"
            )
        found |= dict.fromkeys(fits, pattern)
    return found


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
