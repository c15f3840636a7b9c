"""A dictionary in the place of what it reconstructs, and what the model's loss says to that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from forge_core.checkpoint.store import find_checkpoint
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_core.loading import load_model, model_problem
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.formats import read
from forge_plugins_interp.autoencoders.model import Autoencoder
from forge_plugins_interp.interventions import Intervention, Zero
from forge_plugins_interp.session import Session, inputs_of


@attrs.frozen(kw_only=True, eq=False)
class Splice(Intervention):
    """What an autoencoder makes of a site's value, in its place."""

    kind = "splice"
    dictionary: Dictionary

    def changed(self, value: torch.Tensor, name: str) -> torch.Tensor:
        width = self.dictionary.config.width
        if self.dictionary.predicts():
            raise ConfigError(f"site {name}: a transcoder predicts another site, and cannot stand in for this one")
        if value.shape[-1] != width:
            raise ConfigError(f"site {name}: has {value.shape[-1]} features, and the autoencoder reads {width}")
        dictionary = self.dictionary.to(value.device)
        rows = dictionary.reconstruct(value.reshape(-1, width).float())
        return rows.view_as(value).to(value.dtype)


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


def load_dictionary(path: Path, catalog: Callable[..., Any], log: Callable[[str], None]) -> Dictionary:
    """From a run or a checkpoint of ``forge run``, or from a folder of SAELens or sparsify.

    Raises:
        ConfigError: there is none.
    """
    if (path / "cfg.json").exists():
        return read(path)
    checkpoint = find_checkpoint(path, log, model_problem)
    model = load_model(checkpoint, catalog, torch.device("cpu"), torch.float32).model
    if not isinstance(model, Autoencoder):
        raise ConfigError(f"{path}: is no autoencoder, but a {type(model).__name__}")
    dictionary: Any = model.blocks["0"]
    found: Dictionary = dictionary.requires_grad_(requires_grad=False).eval()
    return found


@torch.no_grad()
def recovery(session: Session, site: str, dictionary: Dictionary, source: DataSource, samples: int) -> Recovery:
    """What is left of the model's predictions over the first samples of a source, on one process or on ranks that have
    logits.

    Raises:
        ConfigError: the session is a pipeline, or the autoencoder is not for this site.
    """
    if session.context.mesh.degrees["pp"] > 1:
        raise ConfigError("this needs the logits on all ranks; open the model with parallel.pp=1")
    totals, count = torch.zeros(4, dtype=torch.float64), 0
    size = session.context.job.train.batch_size
    n = min(samples or len(source), len(source))
    for start in range(0, n, size):
        arrays = source.read(np.arange(start, min(start + size, n)))
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tokens, targets = batch["tokens"], batch["targets"].flatten().to(session.context.device)
        known = inputs_of(source, batch)
        valid = targets != IGNORED
        logs = []
        for change in ([], [Splice(site, dictionary=dictionary)], [Zero(site)]):
            with session.intervene(*change):
                logits = session.model(tokens, **known)
            assert logits is not None, "a pipeline was refused"
            logs.append(torch.log_softmax(logits.flatten(0, 1)[valid].double(), -1))
        losses = [F.nll_loss(log, targets[valid], reduction="sum") for log in logs]
        kl = F.kl_div(logs[1], logs[0], reduction="sum", log_target=True)
        totals += torch.stack([*losses, kl]).cpu()
        count += int(valid.sum())
    return Recovery(*(totals / count).tolist())
