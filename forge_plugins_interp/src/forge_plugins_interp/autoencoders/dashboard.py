"""All that a page of latents shows, of one run: its features, the words of tokens, and what latents do to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.store import find_checkpoint
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.base_model import base_at, base_of_store, load_base, logit_weights
from forge_plugins_interp.autoencoders.config import ActivationStoreConfig
from forge_plugins_interp.autoencoders.features import Features, features, logit_rows
from forge_plugins_interp.autoencoders.features_config import FeaturesConfig
from forge_plugins_interp.autoencoders.splice import load_dictionary
from forge_plugins_interp.store import Store
from forge_plugins_interp.tidy_table import Row

if TYPE_CHECKING:
    from forge_core.contracts.tokenizer import Tokenizer

_SOURCE = "activation_store"


@attrs.frozen(kw_only=True, eq=False)
class Dashboard:
    """Of one run."""

    site: str
    """The site that it reads."""
    target_site: str
    """The site that a transcoder predicts; empty for an autoencoder."""
    features: Features
    tokenizer: Tokenizer | None
    """``None`` if the model is not there any more, or has none."""
    weights: Mapping[int, torch.Tensor]
    """Logits ``(V,)`` of each latent with a card; empty if there are none."""
    notes: Sequence[str]
    """Sentences about what is missing."""
    config: FeaturesConfig

    def word(self, token: int) -> str:
        """The text of a token; without a tokenizer, its number."""
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token])

    def context_rows(self) -> list[Row]:
        """Same as ``Features.context_rows``, with texts."""
        return [{**row, "text": self.word(row["token"])} for row in self.features.context_rows()]

    def logit_rows(self) -> list[Row]:
        """A row for each token that a latent raises or lowers most, with its text."""
        return [{**row, "text": self.word(row["token"])} for row in logit_rows(self.weights, self.config.tokens)]


def open_dashboard(
    run: str | Path,
    config: FeaturesConfig | None = None,
    *,
    chosen: Sequence[int] = (),
    base: Path | None = None,
    catalog: Callable[..., Any] = discover,
    log: Callable[[str], None] = print,
) -> Dashboard:
    """Look at the latents of an autoencoder, or a transcoder, that ``forge run`` has trained.

    Args:
        run: its directory, or a checkpoint's.
        chosen: numbers of the latents that get a card; by default ``config`` decides.
        base: the model's run or checkpoint; by default it is looked for beside the run and beside the store.
        catalog: the installed plugins without these distributions.
        log: prints a line.

    Raises:
        ConfigError: the run is none of an autoencoder, its store is not there, or ``base`` is not what that is of.
    """
    config = config or FeaturesConfig()
    checkpoint = find_checkpoint(Path(run), log, model_problem)
    directory = checkpoint.path.parent.parent
    data = data_of(checkpoint.job(), directory)
    dictionary = load_dictionary(checkpoint.path, catalog, log)
    found = features(dictionary, data, config, chosen)
    store = Store(data.path)
    numbers = [latent.number for latent in found.latents]
    tokenizer, weights, notes = None, {}, []
    try:
        folders = list(dict.fromkeys((directory.parent, store.folder.parent, store.folder.parent / "runs")))
        of_base = base_of_store(store, folders) if base is None else base_at(base, store, log)
        loaded = load_base(of_base, catalog, config.model_gib)
    except ConfigError as error:
        if base is not None:
            raise
        notes.append(f"Tokens have numbers in place of words, and no logits are told: {error}.")
    else:
        tokenizer = loaded.tokenizer
        try:
            directions = dictionary.decoder[numbers]
            weights = dict(
                zip(numbers, logit_weights(loaded.model, directions, data.target_site or data.site), strict=True)
            )
        except ConfigError as error:
            notes.append(f"No logits are told: {error}.")
    return Dashboard(
        site=data.site,
        target_site=data.target_site,
        features=found,
        tokenizer=tokenizer,
        weights=weights,
        notes=notes,
        config=config,
    )


def data_of(job: Mapping[str, Any], directory: Path) -> ActivationStoreConfig:
    """The data of a run, with the path of its store. A relative one is that of the working directory, or of the one
    in which the run was started.

    Raises:
        ConfigError: it has learned from something else, or the store is not there.
    """
    table = job.get("data", {})
    if str(table.get("name", "")).rpartition(":")[2] != _SOURCE:
        raise ConfigError(f"{directory}: has learned from {table.get('name')!r}, and contexts come from an {_SOURCE}")
    path, runs = Path(table["path"]), Path(job.get("run", {}).get("dir", "runs"))
    above = directory.resolve().parents
    started_in = above[min(len(runs.parts), len(above) - 1)]
    places = [path, started_in / path]
    there = next((one for one in places if (one / "manifest.json").exists()), None)
    if there is None:
        raise ConfigError(f"{directory}: the store that it has learned from is not there any more: {path}")
    keys = {key: table[key] for key in ("site", "target_site", "validation", "scale") if key in table}
    return ActivationStoreConfig(path=str(there), **keys)
