"""The adapters of a checkpoint alone, in the format of Hugging Face's PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.checkpoint.store import Checkpoint
from forge_core.errors import ConfigError
from forge_core.registry.catalog import Catalog
from forge_plugins_hf.shards import Described, write_safetensors
from forge_plugins_hf.trained_model import TrainedModel, refuse_existing, written_whole
from forge_plugins_hf.weight_layout import Recipe
from forge_plugins_weights.loading import Weights

FILE = "adapter_model.safetensors"


def to_peft(
    checkpoint: Checkpoint,
    out: Path,
    weights: Weights | None,
    catalog: Callable[[Collection[str]], Catalog],
    architecture: str | None = None,
) -> int:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` into a new folder, in the checkpoint's dtype.

    Returns:
        The number of layers that are adapted.

    Raises:
        ConfigError: the checkpoint has no adapters; an adapted layer is a part of another one in this architecture; or
            there is something at ``out``, or too little room on its disk.
        SaveError: it cannot be written.
    """
    refuse_existing(out)
    model = TrainedModel.of(checkpoint, weights, catalog, architecture)
    adapters = {name: one for name, one in model.folded.items() if one.scale is not None}
    if not adapters:
        raise ConfigError(f"--to peft: {checkpoint.path} has no adapters; it was trained without the pass lora")
    tensors: dict[str, torch.Tensor] = {}
    sizes: dict[str, tuple[int, float]] = {}
    for theirs, recipe in model.recipes.items():
        if adapted := [name for name in recipe.reads if name in adapters]:
            adapter = adapters[adapted[0]]
            _, up, down = map(model.stored, adapter.reads)
            module = model.layout.in_memory(theirs).removesuffix(".weight")
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = _rows(theirs, recipe, up, down, model.table)
            sizes[module] = len(down), float(adapter.scale or 0) * len(down)
    described = [Described(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    with written_whole(out, sum(one.n_bytes for one in described)) as folder:
        write_safetensors(folder / FILE, described, tensors.__getitem__)
        content = _adapter_config(sizes, model.job.checkpoint.load)
        (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return len(sizes)


def _rows(theirs: str, recipe: Recipe, up: torch.Tensor, down: torch.Tensor, table: Mapping[str, Any]) -> torch.Tensor:
    """The rows of ``up``, moved as the recipe moves those of the weight. A recipe that does anything else to the weight
    leaves no low rank."""
    if len(recipe.reads) == 1:
        probe = torch.randn(up.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        matrix = down.double()
        try:
            moved, whole = recipe.make(probe), recipe.make(probe @ matrix)
        except (RuntimeError, IndexError):
            moved, whole = probe[:0], probe
        if moved.ndim == 2 and whole.shape == (len(moved), matrix.shape[1]) and torch.allclose(moved @ matrix, whole):
            return recipe.make(up).contiguous()
    raise ConfigError(
        f"--to peft: {theirs} of {table['architectures'][0]} is made of {', '.join(recipe.reads)}, and has no low-rank "
        "adapter of its own; fold the adapters into the weights with --to huggingface"
    )


def _adapter_config(sizes: Mapping[str, tuple[int, float]], load: Any) -> dict[str, Any]:
    """
    Args:
        sizes: rank and alpha of each module that is adapted.
        load: ``checkpoint.load`` of the run.
    """
    rank, alpha = next(iter(sizes.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(getattr(load, "path", "") or ""),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: own for name, (own, _) in sizes.items() if own != rank},
        "alpha_pattern": {name: own for name, (_, own) in sizes.items() if own != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sizes),
        "inference_mode": True,
    }
