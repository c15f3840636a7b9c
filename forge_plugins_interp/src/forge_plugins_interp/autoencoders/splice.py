"""A dictionary in the place of what it reconstructs, and what the model's loss says to that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.store import find_checkpoint
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.formats import read
from forge_plugins_interp.autoencoders.model import Autoencoder
from forge_plugins_interp.interventions import WholeIntervention, Zero
from forge_plugins_interp.observation import Change
from forge_plugins_interp.session import Session, inputs_of, read_batch
from forge_plugins_interp.sites import PlacedSite, Sites
from forge_plugins_interp.wide import wide
from forge_plugins_weights.loading import load_model


@attrs.frozen(kw_only=True, eq=False)
class Splice(WholeIntervention):
    """What a dictionary makes of a site's value, in its place: an autoencoder's reconstruction, or what a transcoder
    predicts from the value of another site in the same forward. Latents may be changed on the way, which steers by
    features (Templeton et al. 2024). Gradients pass through it.
    """

    kind = "splice"
    dictionary: Dictionary
    reads: str = ""
    """The site that a transcoder reads, which comes before ``site`` in the forward; an autoencoder has none."""
    values: Mapping[int, float] = attrs.field(factory=dict)
    """New activations of latents, by their numbers, in each row. The unit is that of the code, which is of scaled
    rows, as on pages of latents."""
    factors: Mapping[int, float] = attrs.field(factory=dict)
    """By which activations of latents are multiplied, by their numbers; 0 switches a latent off."""
    error: bool = False
    """Add what the dictionary does not explain of the value (Marks et al. 2024, arXiv 2403.19647, section 3.1): the
    value then changes by what the latents change, and without a changed latent stays what it is."""

    def __attrs_post_init__(self) -> None:
        n_latents = self.dictionary.config.latents
        for key, changed in (("values", self.values), ("factors", self.factors)):
            for number in changed:
                if not 0 <= number < n_latents:
                    raise ConfigError(f"{key}: latent {number}: the dictionary has the latents 0 to {n_latents - 1}")
        for number in self.values:
            if number in self.factors:
                raise ConfigError(f"factors: latent {number} has a new activation in values; leave one of them out")

    def placed_on(self, sites: Sites) -> list[tuple[PlacedSite, Change]]:
        """Same as ``WholeIntervention.placed_on``. What a transcoder reads keeps its value, which is remembered.

        Raises:
            ConfigError: ``reads`` is missing or of no use, or in a pipeline the two sites are not of one block.
        """
        if self.dictionary.predicts() != bool(self.reads):
            raise ConfigError(
                f"site {self.site}: a transcoder predicts it from another site; name that as reads"
                if self.dictionary.predicts()
                else f"reads: {self.reads!r} has no effect, as an autoencoder reads the site that it stands in for"
            )
        if not self.reads:
            return super().placed_on(sites)
        (target, read) = (_only(sites, pattern) for pattern in (self.site, self.reads))
        if sites.elsewhere and _block(target) != _block(read):
            raise ConfigError(f"{read} and {target} are of different blocks, which a pipeline parts; use parallel.pp=1")
        if target not in sites.here:
            return []
        seen: list[torch.Tensor] = []

        def remember(value: torch.Tensor) -> torch.Tensor:
            seen[:] = [value]
            return value

        def predict(value: torch.Tensor) -> torch.Tensor:
            if not seen:
                raise ConfigError(f"reads: {read} comes after {target}, and so cannot predict it")
            return self._put(sites.here[target], value, seen[0])

        return [(sites.here[read], remember), (sites.here[target], predict)]

    def apply(self, placed: PlacedSite, value: torch.Tensor) -> torch.Tensor:
        """The whole value of an autoencoder's site with the reconstruction in it."""
        return self._put(placed, value, value)

    def _put(self, placed: PlacedSite, value: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """The value with what the dictionary makes of ``read`` in it, where ``at`` says so."""
        dictionary = self.dictionary.to(value.device)
        width, target_width = dictionary.config.width, dictionary.decoder.shape[1]
        if (read.shape[-1], value.shape[-1]) != (width, target_width) or read.shape[:-1] != value.shape[:-1]:
            raise ConfigError(
                f"site {placed.name}: is {_shape(value)}, from {_shape(read)}; the dictionary makes rows of "
                f"{target_width} features from rows of {width}"
            )
        rows = read.float()
        code = dictionary.encode(rows)
        made = dictionary.decode(self._changed(code), rows)
        if self.error:
            made = value.float() + (made - dictionary.decode(code, rows))
        made = made.to(value.dtype)
        if not self.at:
            return made
        grid = torch.meshgrid(*self._indices(placed, value), indexing="ij")
        return value.index_put(grid, made[grid])

    def _changed(self, code: torch.Tensor) -> torch.Tensor:
        """The code ``(…, F)`` with the latents changed."""
        changed = code.clone()
        for number, value in self.values.items():
            changed[..., number] = value
        for number, factor in self.factors.items():
            changed[..., number] = factor * code[..., number]
        return changed


def _only(sites: Sites, pattern: str) -> str:
    names = sites.names(pattern)
    if len(names) > 1:
        raise ConfigError(f"site {pattern!r}: means {len(names)} sites, and a transcoder reads one and predicts one")
    return names[0]


def _block(name: str) -> list[str]:
    """The beginning of a site's name, which all sites of a block have."""
    return name.split(".")[:2]


def _shape(value: torch.Tensor) -> str:
    return " × ".join(map(str, value.shape))


@attrs.frozen
class Recovery:
    """Losses in nats a token."""

    original: float
    spliced: float
    ablated: float
    """With zeros in the place of the site's value."""
    kl: float
    """Of the original prediction from the spliced one, in nats a token."""

    @property
    def recovered(self) -> float:
        """``(ablated − spliced) / (ablated − original)``: 1 is as good as the model itself."""
        return (self.ablated - self.spliced) / (self.ablated - self.original)


def load_dictionary(
    path: str | Path, catalog: Callable[..., Any] = discover, log: Callable[[str], None] = print
) -> Dictionary:
    """From a run or a checkpoint of ``forge run``, or from a folder of SAELens or sparsify. It is on the CPU, in fp32.

    Args:
        catalog: the installed plugins without these distributions.
        log: prints a line.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    if (path / "cfg.json").exists():
        return read(path)
    checkpoint = find_checkpoint(path, log, model_problem)
    model = load_model(checkpoint, catalog, torch.device("cpu"), torch.float32).model
    if not isinstance(model, Autoencoder):
        raise ConfigError(f"{path}: is no autoencoder, but a {type(model).__name__}")
    dictionary: Any = model.blocks["0"]
    found: Dictionary = dictionary.requires_grad_(requires_grad=False).eval()
    return found


def learned_sites(path: Path, log: Callable[[str], None]) -> tuple[str, str]:
    """The site that the dictionary of a run or a checkpoint stands in for, and the one that a transcoder reads; empty
    where that is not known, as for folders of SAELens and sparsify."""
    if (path / "cfg.json").exists():
        return "", ""
    data = find_checkpoint(path, log, model_problem).job()["data"]
    site, target = str(data.get("site", "")), str(data.get("target_site", ""))
    return (target, site) if target else (site, "")


@torch.no_grad()
def recovery(session: Session, splice: Splice, source: DataSource, samples: int) -> Recovery:
    """What is left of the model's predictions over the first samples of a source, on one process or on ranks that have
    logits.

    Raises:
        ConfigError: the session is a pipeline, or the dictionary is not for this site.
    """
    if session.context.mesh.degrees["pp"] > 1:
        raise ConfigError("this needs the logits on all ranks; open the model with parallel.pp=1")
    totals, count = torch.zeros(4, dtype=torch.float64), 0
    size = session.context.job.train.batch_size
    n = min(samples or len(source), len(source))
    for start in range(0, n, size):
        batch = read_batch(source, np.arange(start, min(start + size, n)))
        tokens, targets = batch["tokens"], batch["targets"].flatten().to(session.context.device)
        known = inputs_of(source, batch)
        valid = targets != IGNORED
        logs = []
        for change in ([], [splice], [Zero(splice.site)]):
            with session.intervene(*change):
                logits = session.model(tokens, **known)
            assert logits is not None, "a pipeline was refused"
            logs.append(torch.log_softmax(wide(logits.flatten(0, 1)[valid]), -1))
        losses = [F.nll_loss(log, targets[valid].to(log.device), reduction="sum") for log in logs]
        kl = F.kl_div(logs[1], logs[0], reduction="sum", log_target=True)
        totals += torch.stack([*losses, kl]).cpu()
        count += int(valid.sum())
    return Recovery(*(totals / count).tolist())
