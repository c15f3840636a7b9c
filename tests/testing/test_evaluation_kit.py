"""The evaluation kit passes evaluations that keep the contract, and has a sentence for each way to break it."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_core.contracts.evaluation import Evaluation
from forge_testing.evaluation import EvaluationConformance


class Entropy(Evaluation):
    """The mean entropy of predictions, in nats, over positions with a target."""

    def __init__(self, source):
        self.source = source

    def run(self, context):
        total, count = 0.0, 0
        for batch in context.batches(self.source):
            logits = context.predict(batch)
            if logits is not None:
                entropy = torch.distributions.Categorical(logits=logits).entropy()
                valid = batch["targets"] != -100
                total += (entropy * valid).sum().item()
                count += int(valid.sum())
        return self.values(context, total, count)

    def values(self, context, total, count):
        sums = context.sum_over_ranks({"total": total, "count": count})
        return {"entropy": sums["total"] / sums["count"]}


class Case(EvaluationConformance):
    evaluation = Entropy

    def make(self, *, open_data):
        return self.evaluation(open_data(None, "data"))


class TestEntropy(Case):
    pass


class LooksFirst(Entropy):
    """It knows of the model what it was shown before it measures."""

    def look_at(self, parts, mesh, job):
        self.stages = mesh.gather_over("pp", len(parts))

    def values(self, context, total, count):
        return {**super().values(context, total, count), "parts": sum(self.stages)}


class TestLooksFirst(Case):
    evaluation = LooksFirst


class TestPerplexity(EvaluationConformance):
    component = "forge-plugins-inference:perplexity"


class TestAccuracy(EvaluationConformance):
    component = "forge-plugins-inference:accuracy"


class TestExactMatch(EvaluationConformance):
    component = "forge-plugins-inference:exact_match"

    @pytest.fixture(autouse=True)
    def _questions(self, tmp_path, monkeypatch):
        file = tmp_path / "questions.jsonl"
        file.write_text("".join(f'{{"prompt": "{2 + n}", "answer": "x"}}\n' for n in range(3)))
        monkeypatch.setattr(self, "config", {"path": str(file), "max_new_tokens": 3}, raising=False)

    def tokenizer(self):
        return SimpleNamespace(
            encode=lambda text: np.array([int(letter) for letter in text]),
            decode=lambda ids: "".join(chr(97 + one) for one in ids),
            end_of_document=31,
        )


class Alone(Entropy):
    """Each rank for itself."""

    def values(self, context, total, count):
        return {"entropy": total / max(count, 1)}


class Counting(Entropy):
    """Something else each time."""

    numbers = itertools.count()

    def values(self, context, total, count):
        return {"number": next(self.numbers)}


class Padded(Entropy):
    """Rows without targets count, of which there are more on two ranks."""

    def run(self, context):
        rows = sum(len(batch["tokens"]) for batch in context.batches(self.source))
        return context.sum_over_ranks({"rows": rows if context.rank == context.world_size - 1 else 0})


class Lonely(Entropy):
    """Only one rank asks."""

    def values(self, context, total, count):
        return super().values(context, total, count) if context.rank == 0 else {"entropy": 0.0}


class WithTensor(Entropy):
    def values(self, context, total, count):
        return {"entropy": torch.tensor(total)}


class NotANumber(Entropy):
    def values(self, context, total, count):
        return {"entropy": float("nan")}


FAULTS = [
    (lambda source: dict, "test_is_an_evaluation", "must return a forge_core.contracts.evaluation.Evaluation, got"),
    (WithTensor, "test_gives_numbers_by_name", "entropy is a Tensor, not a number"),
    (NotANumber, "test_gives_numbers_by_name", "entropy is NaN"),
    (Counting, "test_gives_the_same_once_more", "the same model gives"),
    (Alone, "test_two_ranks_give_what_one_does", "use sum_over_ranks"),
    (Padded, "test_two_ranks_give_what_one_does", "rows is"),
]


@pytest.mark.parametrize(("fault", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(fault, check, sentence):
    case = type("Faulty", (Case,), {"evaluation": staticmethod(fault)})()
    arguments = ["data"] if "two_ranks" in check else []

    with pytest.raises(AssertionError, match=sentence):
        getattr(case, check)(*arguments)


def test_a_rank_that_talks_alone_is_found(monkeypatch):
    monkeypatch.setattr("forge_testing.evaluation.SmallWorld.patience", 0.5)
    case = type("Faulty", (Case,), {"evaluation": Lonely})()

    with pytest.raises(AssertionError, match="more often than they do"):
        case.test_two_ranks_give_what_one_does("data")
