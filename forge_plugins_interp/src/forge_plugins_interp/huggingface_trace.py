"""A model of transformers on the batches of a job's step: fingerprints at the sites that it shares with ours.

The model runs on one process, in fp32. Its modules are named as those of Llama: Qwen, Mistral, OLMo and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.data_source import Source
from forge_core.contracts.loss import IGNORED, apply_loss
from forge_core.data.stream import SampleStream
from forge_core.distributed.mesh import choose_device, join_process_group
from forge_core.errors import ConfigError, nearest_hint
from forge_core.registry.catalog import Catalog
from forge_core.train.sources import data_seed, entries_of, open_source
from forge_plugins_interp.aliases import canonical_site
from forge_plugins_interp.fingerprint import Fingerprint, add_samples
from forge_plugins_interp.out_option import writing
from forge_plugins_interp.site_pattern import matches
from forge_plugins_interp.trace_comparison import FILE, trace_lines

Batch = dict[str, torch.Tensor]
Take = Callable[[torch.Tensor], torch.Tensor]
_READ = ("tokens", "targets", "positions", "document")
"""Entries of a batch that the model can be given."""


@attrs.frozen
class Traced:
    """What has been traced."""

    architecture: str
    n_sites: int
    loss: float
    """In nats a target, the mean over the step."""


def trace_huggingface(
    job: Job, catalog: Catalog, folder: Path, *, step: int, patterns: Sequence[str], out: Path
) -> Traced:
    """Write ``trace.jsonl`` with the lines ``site`` and ``site_gradient`` of one step, as the callback ``trace`` does.

    The step has the samples that it has in a run of ``job``, in their order, and the loss of ``job``; weights are those
    of the folder. Nothing is dropped out, losses of routers are left out, and the model is not updated.

    Args:
        folder: ``config.json`` and weights, as ``save_pretrained`` writes them. No code in it is run.
        step: counts from 1.
        patterns: names or patterns of sites; empty is all.
        out: a folder.

    Raises:
        ConfigError: transformers is not installed; the folder has no model that can be traced, or lacks weights; it has
            no such site; or batches have an entry that it does not take.
    """
    model = _opened(folder)
    chosen = _chosen(_sites(model), patterns, type(model).__name__)
    device = choose_device(job.run.device)
    model.to(device)
    train, build = job.train, ComponentBuilder(catalog)
    total = train.global_batch_size or train.batch_size * (train.grad_accumulation or 1)
    job = attrs.evolve(job, train=attrs.evolve(train, global_batch_size=total))
    loss = build(job.loss)
    join_process_group(device)
    try:
        source = open_source(job, job.data, "data", "train", build, lambda: None)
        _refuse_other_data(source, loss, model, build.words_for(job.loss))
        batches = [{name: one.to(device) for name, one in batch.items()} for batch in _microbatches(job, source, step)]
    finally:
        dist.destroy_process_group()
    values: dict[str, Fingerprint] = {}
    gradients: dict[str, Fingerprint] = {}
    scale, mean = 1 / (sum(map(_weight_of_targets, batches)) or 1), 0.0
    with _watched(chosen, values, gradients):
        for batch in batches:
            part = _loss(model, loss, batch) * scale
            part.backward()  # type: ignore[no-untyped-call]
            mean += float(part.detach())
    backward = {name: gradients[name] for name in reversed(values) if name in gradients}
    text = trace_lines(step, "site", values) + trace_lines(step, "site_gradient", backward)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / FILE).write_text(text, encoding="utf-8")
    return Traced(type(model).__name__, len(values), mean)


def _opened(folder: Path) -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ConfigError("--huggingface needs transformers: pip install 'forge-plugins-interp[huggingface]'") from None
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--huggingface {folder}: the folder has no config.json")
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        (line, *_) = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(f"--huggingface {folder}: transformers cannot open it: {line}") from error
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"--huggingface {folder}: has no weights of {missing[0]}; transformers would make some up")
    _refuse_other_models(folder, model)
    return model.eval()


def _refuse_other_models(folder: Path, model: Any) -> None:
    names = dict(model.named_modules())
    for name in ("model.embed_tokens", "model.layers", "model.norm", "lm_head"):
        if name not in names:
            raise ConfigError(
                f"--huggingface {folder}: a {type(model).__name__} has no module {name}; a trace is of models whose "
                "modules are named as those of Llama"
            )
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if (value := getattr(model.config, key, None)) not in (None, 1):
            raise ConfigError(
                f"--huggingface {folder}: config.json has {key} = {value}, by which its head is no product alone; a "
                "trace has no such loss"
            )


@attrs.frozen
class _Place:
    """Where a site is in the model."""

    module: nn.Module
    is_input: bool = False
    take: Take = lambda value: value
    """Lays the value out as our site has it."""


def _sites(model: Any) -> dict[str, _Place]:
    """The sites of the model by our names."""
    heads: int = model.config.num_attention_heads
    inputs: dict[str, tuple[str, Take]] = {
        "": ("resid_pre", lambda value: value),
        "post_attention_layernorm": ("resid_mid", lambda value: value),
        "mlp.down_proj": ("mlp_post", lambda value: value),
        "self_attn.o_proj": ("z", lambda value: value.reshape(*value.shape[:2], heads, -1).transpose(1, 2)),
    }
    named: dict[str, nn.Module] = dict(model.named_modules())
    found: dict[str, _Place] = {}
    for name, module in named.items():
        site = canonical_site(name)
        if site != name:
            found[site] = _Place(module)
    for layer, block in model.model.layers.named_children():
        for name, (site, take) in inputs.items():
            if (full := f"model.layers.{layer}.{name}".rstrip(".")) in named:
                found[f"blocks.{layer}.{site}"] = _Place(named[full], is_input=True, take=take)
        if hasattr(block, "post_feedforward_layernorm"):
            # the norm after attention is then one of what attention gives
            del found[f"blocks.{layer}.mlp_in"], found[f"blocks.{layer}.resid_mid"]
    if type(model.model.embed_tokens) is not nn.Embedding:  # it multiplies by a factor, which our embed does not
        del found["embed"]
    return found


def _chosen(sites: Mapping[str, _Place], patterns: Sequence[str], architecture: str) -> dict[str, _Place]:
    wanted: set[str] = set()
    for pattern in patterns:
        canonical = canonical_site(pattern)
        found = {name for name in sites if matches(name, canonical)}
        if not found:
            hint = nearest_hint(canonical, sites)
            raise ConfigError(f"site {pattern!r}: {architecture} has none of that name{hint}")
        wanted |= found
    return {name: place for name, place in sites.items() if not patterns or name in wanted}


def _refuse_other_data(source: Source, loss: Any, model: Any, words: str) -> None:
    """
    Args:
        words: names the loss.
    """
    if source.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"--huggingface: the model has a vocabulary of {model.config.vocab_size}, and the data one of "
            f"{source.vocab_size}; give data that were made by its tokenizer"
        )
    entries = entries_of(source)
    for name, entry in entries.items():
        if name not in _READ and (entry is None or entry.wanted_by == "model"):
            raise ConfigError(f"data: batches have the entry {name!r}, which a model of transformers is not given here")
    if "weights" in entries and not getattr(loss, "takes_weights", False):
        raise ConfigError(f"data: batches have weights of targets, which {words} does not take")
    if _has_windows(model.config) and not entries.keys().isdisjoint(("positions", "document")):
        raise ConfigError(
            f"data: batches have documents or padding, and a {type(model).__name__} has layers that see a window, "
            "whose mask transformers makes itself; choose data without, such as document_mask = false"
        )


def _microbatches(job: Job, source: Source, step: int) -> Iterator[Batch]:
    """Those of a step on one process, as a run reads them."""
    stream = SampleStream(source, data_seed(job), job.data.config.shuffle)
    n_samples, size = job.train.global_batch_size, job.train.batch_size
    assert n_samples, "it has been resolved"
    positions = (step - 1) * n_samples + np.arange(n_samples)
    if stream.streams is not None:  # they are read from their start, and all of that is not to be kept
        stream.streams.forget_before(stream.samples_read(int(positions[0])))
    whole = {name: torch.from_numpy(array) for name, array in stream.read(positions).items()}
    for start in range(0, n_samples, size):
        yield {name: entry[start : start + size] for name, entry in whole.items()}


def _weight_of_targets(batch: Batch) -> float:
    """How many there are; with weights, their sum."""
    is_target = batch["targets"] != IGNORED
    return float(is_target.sum() if "weights" not in batch else batch["weights"][is_target].double().sum())


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return any(kind != "full_attention" for kind in kinds) if kinds else bool(getattr(config, "sliding_window", None))


@contextmanager
def _watched(
    places: Mapping[str, _Place], values: dict[str, Fingerprint], gradients: dict[str, Fingerprint]
) -> Iterator[None]:
    """Add the value of each site in each forward, and its gradient in each backward."""

    def see(name: str, place: _Place, value: torch.Tensor) -> None:
        add_samples(values, name, place.take(value), 0)
        if value.requires_grad:
            value.register_hook(lambda gradient: add_samples(gradients, name, place.take(gradient), 0))  # type: ignore[no-untyped-call]

    def hooked(name: str, place: _Place) -> Any:
        if place.is_input:
            return place.module.register_forward_pre_hook(lambda _, args: see(name, place, args[0]))
        return place.module.register_forward_hook(
            lambda _, args, output: see(name, place, output[0] if isinstance(output, tuple) else output)
        )

    with ExitStack() as stack:
        for name, place in places.items():
            stack.callback(hooked(name, place).remove)
        yield


def _loss(model: Any, loss: Any, batch: Batch) -> torch.Tensor:
    """The summed loss of a microbatch."""
    hidden = model.model(
        input_ids=batch["tokens"],
        position_ids=batch.get("positions"),
        attention_mask=_mask(batch),
        use_cache=False,
    ).last_hidden_state
    taken = {name: batch[name] for name in getattr(loss, "takes_entries", ()) if name in batch}
    head = model.get_output_embeddings()
    return apply_loss(partial(loss, **taken), hidden, head, batch["targets"], batch.get("weights")).total


def _mask(batch: Batch) -> torch.Tensor | None:
    """``(B, 1, S, S)`` fp32 to be added to scores; ``None`` where transformers' own is the same.

    From positions alone, transformers would guess where documents begin.
    """
    if "positions" not in batch and "document" not in batch:
        return None
    tokens = batch["tokens"]
    seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
    document = batch.get("document", torch.zeros_like(tokens))
    seen = seen & (document[:, :, None] == document[:, None, :])
    return torch.zeros(seen.shape, device=tokens.device).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
