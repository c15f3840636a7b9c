"""Dictionaries in the files of SAELens and of sparsify, both ways.

These read activations as they are. So the number that the data were divided by is folded in: codes are larger by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from forge_core.checkpoint.fsync import make_folder
from forge_core.errors import ConfigError
from forge_plugins_interp.autoencoders.config import (
    AutoencoderConfig,
    BatchTopKConfig,
    JumpReluConfig,
    TopKConfig,
    TranscoderConfig,
)
from forge_plugins_interp.autoencoders.dictionary import Dictionary

Format = Literal["saelens", "sparsify"]
Tensors = Mapping[str, torch.Tensor]


def write(dictionary: Dictionary, folder: Path, form: Format, site: str) -> None:
    """Write ``cfg.json`` and the weights.

    Args:
        site: where it was trained, for the file.

    Raises:
        ConfigError: the format has no such dictionary.
    """
    config = dictionary.config
    if form == "saelens" and isinstance(config, TranscoderConfig):
        raise ConfigError("--format saelens: is written for autoencoders; give a transcoder the format sparsify")
    is_by_rows = isinstance(config, TopKConfig) and not isinstance(config, BatchTopKConfig)
    if form == "sparsify" and not is_by_rows:
        raise ConfigError("--format sparsify: knows the largest latents of each row alone; use --format saelens")
    make_folder(folder)
    tensors = unscaled(dictionary)
    facts, named = _saelens(config, tensors, site) if form == "saelens" else _sparsify(config, tensors)
    (folder / "cfg.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / _FILES[form])


_FILES: Mapping[Format, str] = {"saelens": "sae_weights.safetensors", "sparsify": "sae.safetensors"}


@torch.no_grad()
def unscaled(dictionary: Dictionary) -> dict[str, torch.Tensor]:
    """The tensors of the same function of rows that are not scaled, with codes larger by the scale of the input."""
    read, predicted = dictionary.scales.tolist()
    if not dictionary.predicts():
        predicted = read
    found = {
        "encoder": dictionary.encoder.detach().float(),
        "encoder_bias": dictionary.encoder_bias.detach().float() * read,
        "decoder": F.normalize(dictionary.decoder.detach().float(), dim=-1) * (predicted / read),
        "decoder_bias": dictionary.decoder_bias.detach().float() * predicted,
    }
    if dictionary.skip is not None:
        found["skip"] = dictionary.skip.detach().float() * (predicted / read)
    if dictionary.log_threshold is not None:
        found["threshold"] = dictionary.log_threshold.detach().float().exp() * read
    elif isinstance(dictionary.config, BatchTopKConfig):
        found["threshold"] = (dictionary.threshold.float() * read).expand(dictionary.config.latents)
    return found


def _saelens(config: AutoencoderConfig, tensors: Tensors, site: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    facts: dict[str, Any] = {
        "architecture": "jumprelu" if "threshold" in tensors else "topk",
        "d_in": config.width,
        "d_sae": config.latents,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"hook_name": site},
    }
    named = {
        "W_enc": tensors["encoder"].T,
        "b_enc": tensors["encoder_bias"],
        "W_dec": tensors["decoder"],
        "b_dec": tensors["decoder_bias"],
    }
    if "threshold" in tensors:
        named["threshold"] = tensors["threshold"].clone()
    else:
        assert isinstance(config, TopKConfig), "the others have thresholds"
        facts["k"] = config.k
    return facts, named


def _sparsify(config: AutoencoderConfig, tensors: Tensors) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    assert isinstance(config, TopKConfig), "refused before"
    facts = {
        "activation": "topk",
        "expansion_factor": 0,
        "normalize_decoder": not isinstance(config, TranscoderConfig),
        "num_latents": config.latents,
        "k": config.k,
        "multi_topk": False,
        "skip_connection": "skip" in tensors,
        "transcode": isinstance(config, TranscoderConfig),
        "d_in": config.width,
    }
    named = {
        "encoder.weight": tensors["encoder"],
        "encoder.bias": tensors["encoder_bias"],
        "W_dec": tensors["decoder"],
        "b_dec": tensors["decoder_bias"],
    }
    return facts, named | ({"W_skip": tensors["skip"]} if "skip" in tensors else {})


def read(folder: Path) -> Dictionary:
    """A dictionary from the files of SAELens or sparsify, on the CPU, to be spliced in. Its rows of ``W_dec`` keep
    their norms by larger codes.

    Raises:
        ConfigError: the files are not there, damaged, or of a kind that is not known.
    """
    form: Format = "saelens" if (folder / _FILES["saelens"]).exists() else "sparsify"
    try:
        facts = json.loads((folder / "cfg.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / _FILES[form])
    except Exception as error:
        raise ConfigError(f"{folder} has no dictionary of SAELens or sparsify that can be read: {error}") from error
    make: Callable[[Path, dict[str, Any], Tensors], tuple[AutoencoderConfig, dict[str, torch.Tensor]]]
    make = _from_saelens if form == "saelens" else _from_sparsify
    try:
        config, found = make(folder, facts, tensors)
    except KeyError as error:
        raise ConfigError(f"{folder}: the files of {form} have no {error}") from error
    return _filled(config, found)


def _from_saelens(
    folder: Path, facts: dict[str, Any], tensors: Tensors
) -> tuple[AutoencoderConfig, dict[str, torch.Tensor]]:
    sizes = {"width": facts["d_in"], "latents": facts["d_sae"]}
    kind = facts["architecture"]
    if facts.get("normalize_activations", "none") != "none" or not facts.get("apply_b_dec_to_input", True):
        raise ConfigError(f"{folder}: normalises activations, or does not take b_dec off; neither can be read")
    found = {
        "encoder": tensors["W_enc"].T,
        "encoder_bias": tensors["b_enc"],
        "decoder": tensors["W_dec"],
        "decoder_bias": tensors["b_dec"],
    }
    if kind == "topk":
        return TopKConfig(**sizes, k=facts["k"]), found
    if kind == "jumprelu":
        return JumpReluConfig(**sizes, l0_coefficient=0.0), found | {"threshold": tensors["threshold"]}
    raise ConfigError(f"{folder}: architecture {kind!r} cannot be read; topk and jumprelu can")


def _from_sparsify(
    folder: Path, facts: dict[str, Any], tensors: Tensors
) -> tuple[AutoencoderConfig, dict[str, torch.Tensor]]:
    if facts.get("activation", "topk") != "topk" or facts.get("multi_topk"):
        raise ConfigError(f"{folder}: activation {facts.get('activation')!r} cannot be read; topk can")
    latents = len(tensors["W_dec"])
    found = {
        "encoder": tensors["encoder.weight"],
        "encoder_bias": tensors["encoder.bias"],
        "decoder": tensors["W_dec"],
        "decoder_bias": tensors["b_dec"],
    }
    if not facts.get("transcode"):
        return TopKConfig(width=facts["d_in"], latents=latents, k=facts["k"]), found
    config = TranscoderConfig(
        width=facts["d_in"],
        latents=latents,
        k=facts["k"],
        target_width=tensors["W_dec"].shape[1],
        skip=bool(facts.get("skip_connection")),
    )
    return config, found | ({"skip": tensors["W_skip"]} if config.skip else {})


@torch.no_grad()
def _filled(config: AutoencoderConfig, found: dict[str, torch.Tensor]) -> Dictionary:
    """``Dictionary`` gives rows of ``W_dec`` the norm 1: other norms of the files go to the scale of the output, if
    they are all equal, and to the codes otherwise."""
    dictionary = Dictionary(config)
    norms = found["decoder"].float().norm(dim=-1)
    typical = float(norms.median())
    if not torch.allclose(norms, torch.full_like(norms, typical), rtol=1e-3):
        if isinstance(config, TopKConfig):
            raise ConfigError(
                "rows of W_dec have different norms, by which other latents are largest; it cannot be read"
            )
        found = {**found, "encoder": found["encoder"] * norms[:, None], "encoder_bias": found["encoder_bias"] * norms}
        found["threshold"] = found["threshold"] * norms
        typical = 1.0
    # codes are those of the files times the norm, which the output takes back
    found["encoder"], found["encoder_bias"] = found["encoder"] * typical, found["encoder_bias"] * typical
    if "threshold" in found:
        found["threshold"] = found["threshold"] * typical
    dictionary.scales.fill_(1)
    for name in ("idle", "threshold", "fired", "sums"):
        getattr(dictionary, name).zero_()
    for name, tensor in found.items():
        if name == "threshold":
            assert dictionary.log_threshold is not None, "it has thresholds"
            dictionary.log_threshold.copy_(tensor.clamp(min=1e-30).log())
        else:
            getattr(dictionary, name).copy_(tensor)
    return dictionary.requires_grad_(requires_grad=False).eval()
