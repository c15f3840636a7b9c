"""A trained model and its tokenizer, from a checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import attrs
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from forge_core.checkpoint.compatibility import plugins_missing, used_plugins
from forge_core.checkpoint.contents import leads_outside, model_problem
from forge_core.checkpoint.manifest import as_size
from forge_core.checkpoint.safe_reader import refuse_misfits
from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.checkpoint.store import Checkpoint
from forge_core.checkpoint.upgrading import module_changes
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.config.unstructure import plain
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError, ForgeError
from forge_core.job import load_job
from forge_core.registry.catalog import Catalog
from forge_core.train.build import build_on_meta, cast_parameters, materialise
from forge_core.train.initialisation import SeededInitializer, named_tensors

__all__ = ["LoadedModel", "SeededInitializer", "build_on_meta", "build_within", "load_model", "model_problem"]
__all__ += ["named_tensors"]

_BUFFER_BYTES = 2**30
"""A buffer that is not stored may have so many in any case."""


@attrs.frozen
class LoadedModel:
    """A whole model from a checkpoint, on one device, without passes."""

    job: Job
    model: nn.Module
    tokenizer: Tokenizer | None


def load_model(
    checkpoint: Checkpoint,
    catalog: Callable[[Collection[str]], Catalog],
    device: torch.device,
    dtype: torch.dtype | None,
) -> LoadedModel:
    """Rebuild the model of ``checkpoint`` on ``device``, with parameters in ``dtype`` or in that of the file.

    Raises:
        ConfigError: the checkpoint needs a component that is not installed, or does not fit it.
    """
    if problem := model_problem(checkpoint.path):
        raise ConfigError(f"checkpoint {checkpoint.path} cannot be used: {problem}")
    state, table = checkpoint.state(), checkpoint.job()
    try:
        job = load_job(checkpoint.path / "job.toml", catalog=catalog)
    except ConfigError as error:
        used = used_plugins(table, state.get("tokenizer"))
        if missing := plugins_missing(checkpoint.manifest.versions, used):
            what = ", ".join(missing) + (", which is" if len(missing) == 1 else ", which are")
            raise ConfigError(f"{error}\n{checkpoint.path} was written with {what} not installed") from error
        raise
    if (outside := leads_outside(plain(job.model))) is not None:
        raise ConfigError(f"{checkpoint.path}/job.toml: model: {outside!r} leads outside of the checkpoint")
    build = ComponentBuilder(catalog(job.plugins.disable))
    model = build_within(checkpoint, job, state["vocab_size"], build)
    materialise(model, device, job.train.seed)
    checkpoint.load(_to_read(checkpoint, model))
    if dtype is not None:
        cast_parameters(model, dtype)
    return LoadedModel(job, model, _tokenizer(state.get("tokenizer"), checkpoint, build))


def build_within(checkpoint: Checkpoint, job: Job, vocab_size: int, build: ComponentBuilder) -> nn.Module:
    """The model of ``job`` on meta, whose tensors are those of ``checkpoint``. What a stranger has written may mean any
    size; building stops as soon as it goes beyond what is stored.

    Raises:
        ConfigError: the model cannot be built, or has other tensors.
    """
    sizes = [entry.size.numel() for key, entry in checkpoint.saved_tensors().items() if key.startswith("model.")]
    most_parameters, most_values = 4 * len(sizes) + 100, sum(sizes)  # tied ones are made before they are one
    made = 0

    def refuse_more(_: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made
        made += parameter is not None
        if made > most_parameters or (parameter is not None and parameter.numel() > most_values):
            raise ConfigError(
                f"{checkpoint.path}: job.toml describes another model than the one whose {len(sizes)} tensors of "
                f"{most_values:,} values are stored: it is larger (at {name!r})"
            )

    watch = register_module_parameter_registration_hook(refuse_more)
    try:
        model = build_on_meta(job, vocab_size, build)
    except ForgeError:
        raise
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            f"{checkpoint.path}: the model that job.toml describes cannot be built ({first_line})"
        ) from error
    finally:
        watch.remove()
    refuse_misfits(checkpoint.path, _to_read(checkpoint, model))
    _refuse_large_buffers(checkpoint, model)
    return model


def _to_read(checkpoint: Checkpoint, model: nn.Module) -> dict[str, torch.Tensor]:
    """By their keys in the checkpoint."""
    changes = module_changes([model], checkpoint.state().get("modules", {}))
    return changes.to_read(model_tensors(named_parameters([model]), [model]))


def _refuse_large_buffers(checkpoint: Checkpoint, model: nn.Module) -> None:
    """The buffers that are not stored, such as tables of positions."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        n_bytes = buffer.numel() * buffer.itemsize
        if name not in stored and n_bytes > max(_BUFFER_BYTES, 16 * checkpoint.manifest.n_bytes):
            raise ConfigError(
                f"{checkpoint.path}: by its job.toml, {name} would take {as_size(n_bytes)}, and the whole checkpoint "
                f"has {as_size(checkpoint.manifest.n_bytes)}"
            )


def _tokenizer(table: Mapping[str, object] | None, checkpoint: Checkpoint, build: ComponentBuilder) -> Tokenizer | None:
    if table is None:
        return None
    folder = checkpoint.path / "tokenizer"
    for name in filter(lambda value: isinstance(value, str), table.values()):
        if (folder / str(name)).exists() and f"tokenizer/{name}" not in checkpoint.manifest.files:
            raise ConfigError(f"{checkpoint.path}: tokenizer/{name} is not among the files that its manifest names")
    tokenizer: Tokenizer = build(build.resolve("tokenizer", table), base=folder)
    return tokenizer
