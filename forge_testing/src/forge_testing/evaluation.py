"""Conformance of evaluations (contract: ``forge_core.contracts.evaluation``)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from forge_core.config.sections import Job
from forge_core.contracts.callback import RanksByAxis
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.evaluation import Evaluation, EvaluationConfig, EvaluationContext, LossTotal
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.loader import evaluation_batches
from forge_core.train.initialisation import SeededInitializer
from forge_testing.component_case import ComponentCase
from forge_testing.small_model import SEQ_LEN, SmallModel, cross_entropy, small_job


class EvaluationConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it.

    The data of the evaluation are seven samples of 32 token ids; override ``source`` for one that needs others.
    """

    kind = "evaluation"

    def source(self) -> DataSource:
        """The data that ``open_data`` opens."""
        return SmallSource()

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the training data."""
        return None

    def build(self) -> Evaluation:
        given: dict[str, Any] = {"open_data": lambda use, key: self.source()}
        if self.component:  # whose factory is given what it takes
            given |= {"tokenizer": self.tokenizer(), "seq_len": SEQ_LEN}
        evaluation: Evaluation = self.make(**given)
        return evaluation

    def test_is_an_evaluation(self) -> None:
        evaluation = self.build()

        assert isinstance(evaluation, Evaluation), (
            f"the factory must return a forge_core.contracts.evaluation.Evaluation, got {type(evaluation).__qualname__}"
        )

    def test_its_config_has_the_keys_of_every_evaluation(self) -> None:
        if not self.component:
            pytest.skip("make() is overridden")
        config = type(self.use().config)

        assert issubclass(config, EvaluationConfig), f"{config.__qualname__} must extend EvaluationConfig"

    def test_gives_numbers_by_name(self) -> None:
        for name, value in self.values(SmallWorld(1))[0].items():
            assert isinstance(name, str), f"a name is {name!r}, not a string"
            assert type(value).__name__ != "bool", f"{name} is a bool, not a number"
            assert issubclass(type(value), Real), f"{name} is a {type(value).__name__}, not a number"
            assert not math.isnan(value), f"{name} is NaN; leave out what cannot be measured"

    def test_gives_the_same_once_more(self) -> None:
        evaluation, world = self.build(), SmallWorld(1)

        first, again = (world.run([evaluation])[0] for _ in range(2))

        assert first == again, f"the same model gives {first}, and then {again}"

    @pytest.mark.parametrize("layout", ["data", "pipeline"])
    def test_two_ranks_give_what_one_does(self, layout: str) -> None:
        expected = self.values(SmallWorld(1))[0]
        first, second = self.values(SmallWorld(2, stages=layout == "pipeline"))

        assert first == second, f"one of two ranks gives {first}, the other {second}; use sum_over_ranks"
        assert first.keys() == expected.keys(), f"one rank gives {sorted(expected)}, two give {sorted(first)}"
        for name, value in first.items():
            assert math.isclose(value, expected[name], rel_tol=1e-4, abs_tol=1e-6), (
                f"{name} is {value} on two {'pipeline stages' if layout == 'pipeline' else 'data-parallel ranks'}, and "
                f"{expected[name]} on one; use sum_over_ranks, and leave out targets of -100"
            )

    def values(self, world: SmallWorld) -> list[Mapping[str, float]]:
        """What each rank gives."""
        return world.run([self.build() for _ in range(world.ranks)])


class SmallSource:
    """Seven samples of ``SEQ_LEN`` tokens; the second half of the last one has no targets."""

    vocab_size = 32
    tokenizer: Tokenizer | None = None
    fingerprint = "seven samples"

    def __init__(self) -> None:
        ids = np.random.default_rng(0).integers(0, self.vocab_size, (7, SEQ_LEN + 1))
        self._tokens, self._targets = ids[:, :-1], ids[:, 1:].copy()
        self._targets[-1, SEQ_LEN // 2 :] = -100

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": self._tokens[indices], "targets": self._targets[indices]}


class SmallWorld:
    """Ranks that are threads, and the small model on each of them.

    Args:
        stages: the ranks are pipeline stages, and not data-parallel ones.
    """

    patience = 20.0
    """Seconds that a rank waits for another."""

    def __init__(self, ranks: int, *, stages: bool = False) -> None:
        self.ranks = ranks
        self.stages = stages
        self.model = SmallModel()
        self.model.init_weights(SeededInitializer(0))
        self._barrier = threading.Barrier(ranks, timeout=self.patience)
        self._given: dict[int, Any] = {}

    def run(self, evaluations: Sequence[Evaluation]) -> list[Mapping[str, float]]:
        def one(rank: int) -> Mapping[str, float]:
            context = self.context(rank)
            evaluations[rank].look_at(context.parts, context.mesh, context.job)
            with torch.no_grad():
                return evaluations[rank].run(context)

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(one, range(self.ranks)))

    def context(self, rank: int) -> EvaluationContext:
        """The model as a rank's evaluations see it."""
        return _Rank(self, rank)

    def exchange(self, rank: int, values: Any) -> list[Any]:
        """What all ranks give. One that does not ask as often as the others breaks the barrier."""
        try:
            self._barrier.wait()
            self._given[rank] = values
            self._barrier.wait()
            given = [self._given[other] for other in range(self.ranks)]
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise AssertionError("a rank talks to the others more often than they do") from None
        return given


@attrs.define
class _Mesh:
    """The ``RanksByAxis`` of one rank."""

    world: SmallWorld
    rank: int

    @property
    def degrees(self) -> Mapping[str, int]:
        axes = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
        return axes | {"pp" if self.world.stages else "dp_shard": self.world.ranks}

    def sum_over(self, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        for axis in axes:
            value.copy_(sum(one.clone() for one in self.gather_over(axis, value.clone())))
        return value

    def gather_over(self, axis: str, value: Any) -> list[Any]:
        return self.world.exchange(self.rank, value) if self.degrees[axis] > 1 else [value]


@attrs.define
class _Rank:
    """The ``EvaluationContext`` of one rank."""

    world: SmallWorld
    rank: int
    job: Job = attrs.field(factory=small_job)
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    tokenizer: Tokenizer | None = None
    log: Callable[[str], None] = print
    world_size: int = attrs.field(init=False)
    parts: Sequence[torch.nn.Module] = attrs.field(init=False)
    mesh: RanksByAxis = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.world_size = self.world.ranks
        self.parts = [self.world.model] if self._is_last_stage() else []
        self.mesh = _Mesh(self.world, self.rank)

    def losses(self, source: DataSource, *, samples: int = 0, by: str = "source") -> LossTotal:
        each: list[dict[str, float]] = []
        for index in range(min(samples or len(source), len(source))):
            one = {name: torch.from_numpy(entry) for name, entry in source.read(np.array([index])).items()}
            summed = self.world.model(one["tokens"], targets=one["targets"], loss=cross_entropy)
            counts = self._is_last_stage() if self.world.stages else index % self.world.ranks == self.rank
            each.append({"total": summed.total.item() * counts, "count": summed.count.item() * counts})
        flat = {f"{index} {name}": value for index, one in enumerate(each) for name, value in one.items()}
        summed_up = self.sum_over_ranks(flat)
        totals = [LossTotal(summed_up[f"{index} total"], summed_up[f"{index} count"]) for index in range(len(each))]
        whole = LossTotal(sum(one.total for one in totals), sum(one.count for one in totals))
        return attrs.evolve(whole, samples=totals) if by == "sample" else whole

    def batches(self, source: DataSource, *, samples: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        rank, size = (0, 1) if self.world.stages else (self.rank, self.world.ranks)
        return evaluation_batches(source, batch_size=2, dp_rank=rank, dp_size=size, samples=samples)

    def predict(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        inputs: dict[str, Any] = {name: entry for name, entry in batch.items() if name != "targets"}
        return self.world.model(**inputs) if self._is_last_stage() else None

    def looks_ahead(self) -> bool:
        return False

    def sum_over_ranks(self, values: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
        given = self.world.exchange(self.rank, {name: float(value) for name, value in values.items()})
        return {name: sum(one[name] for one in given) for name in values}

    def _is_last_stage(self) -> bool:
        return not self.world.stages or self.rank == self.world.ranks - 1
