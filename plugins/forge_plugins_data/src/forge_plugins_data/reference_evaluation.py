"""The evaluation ``preference_reference``: log-probabilities of pairs, written to a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from forge_core.config.sections import TrainSection
from forge_core.contracts.builder import Builder
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.evaluation import Evaluation, EvaluationContext, OpenData
from forge_core.contracts.loss import IGNORED
from forge_core.errors import ConfigError
from forge_core.job import read_document
from forge_plugins_data.preference_config import PreferenceReferenceConfig
from forge_plugins_data.preference_pairs import PreferencePairs
from forge_plugins_data.preference_reference import digest_of, refuse_unwritable, write_reference


class PreferenceReference(Evaluation):
    """Measures the answers of all pairs of a job, and writes the file that it names as ``data.reference``."""

    def __init__(
        self, config: PreferenceReferenceConfig, /, *, open_data: OpenData, build: Builder, seq_len: int
    ) -> None:
        self._job = config.job
        table = read_document(Path(config.job).expanduser()).table
        self._train = {"precision": attrs.fields(TrainSection).precision.default, **table.get("train", {})}
        self._refuse_other_than("seq_len", seq_len)
        pairs, self._out = _pairs_of(config.job, table.get("data"), build)
        refuse_unwritable(self._out)
        source = open_data(pairs, "job")
        assert isinstance(source, PreferencePairs)
        assert source.tokenizer is not None
        self._source, self._tokenizer = source, source.tokenizer

    def run(self, context: EvaluationContext) -> Mapping[str, float]:
        self._refuse_other_than("precision", context.job.train.precision)
        n_pairs = len(self._source.pairs)
        values = np.zeros((n_pairs, 2))
        for batch in context.batches(self._source):
            logits = context.predict(batch)
            if logits is not None:
                for place, value in _log_probabilities(logits, batch):
                    values[place] = value
        summed = context.sum_over_ranks({str(number): value for number, value in enumerate(values.flat)})
        values = np.array([*summed.values()]).reshape(n_pairs, 2)
        if context.rank == 0:
            keys = [pair.key for pair in self._source.pairs]
            write_reference(self._out, keys, values, self._tokenizer.fingerprint, _checkpoint_of(context))
            context.log(f"{self._out}: {n_pairs:,} pairs")
        chosen, rejected = values.mean(axis=0).tolist()
        likelier = float((values[:, 0] > values[:, 1]).mean())
        return {"pairs": n_pairs, "chosen": chosen, "rejected": rejected, "chosen_is_likelier": likelier}

    def _refuse_other_than(self, key: str, here: object) -> None:
        """What is compared is rounded and cut alike."""
        there = self._train.get(key, here)
        if here != there:
            raise ConfigError(
                f"{self._job}: train.{key} is {there}, and that of the evaluated run {here}; add train.{key}={there} "
                "to the command"
            )


def _checkpoint_of(context: EvaluationContext) -> Mapping[str, Any] | None:
    """The checkpoint that ``forge eval`` reads; a run that evaluates while it trains has none."""
    checkpoint = getattr(context, "checkpoint", None)
    if checkpoint is None:
        return None
    return {"path": str(checkpoint.path), "step": checkpoint.step, "digest": digest_of(checkpoint.path)}


def _pairs_of(job: str, data: Any, build: Builder) -> tuple[ComponentRef, Path]:
    """The data of a configuration, without their reference, and the file that this is to be written to."""
    if (
        not isinstance(data, dict)
        or data.get("name") != "preference_pairs"
        or not isinstance(data.get("reference"), str)
    ):
        raise ConfigError(f"{job}: [data] must be preference_pairs, with a file to write as its reference")
    pairs = build.resolve("data_source", {key: value for key, value in data.items() if key != "reference"})
    return pairs, Path(data["reference"]).expanduser()


def _log_probabilities(
    logits: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[tuple[int, int], float]]:
    """By the number of a pair, and 0 for its chosen answer or 1 for the rejected one, the log-probability of the answer
    in nats: the sum over its tokens, in float64.

    Args:
        logits: ``(B, S, V)``.
        batch: of ``PreferencePairs`` without a reference. Rows without targets are left out.
    """
    losses = [  # row by row, as a copy in fp32 of all logits would be large
        F.cross_entropy(of_row.float(), answers, ignore_index=IGNORED, reduction="none")
        for of_row, answers in zip(logits, batch["answers"], strict=True)
    ]
    read = (batch["document"], batch["pair"], batch["targets"])
    for each, document, pair, targets in zip(*(rows.cpu() for rows in (torch.stack(losses), *read)), strict=True):
        if (targets == IGNORED).all():
            continue
        of_documents = torch.zeros(len(each), dtype=torch.float64).index_add_(0, document, -each.double())
        for place in (pair >= 0).nonzero().flatten().tolist():
            number = int(document[place])
            yield (int(pair[place]), number % 2), float(of_documents[number])
