import math
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import ExpertChoiceConfig
from forge_plugins_moe.routers.expert_choice import ExpertChoice, gumbel_difference, ranks_in_group

DIM, EXPERTS = 12, 6


def router(**keys: Any) -> ExpertChoice:
    router = ExpertChoice(ExpertChoiceConfig(**keys), dim=DIM, n_experts=EXPERTS)
    router.init_weights(SeededInitializer(0), "", 0.5)
    return router


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def pairs(routing: Any) -> dict[tuple[int, int], float]:
    """Weight by token and expert, of the assignments to an expert."""
    rows = zip(routing.token.tolist(), routing.expert.tolist(), routing.weight.tolist(), strict=True)
    return {(token, expert): weight for token, expert, weight in rows if expert < EXPERTS}


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_is_what_the_paper_says(scope, scores):
    """200 random cases against one expert after the other."""
    for case in range(200):
        generator = torch.Generator().manual_seed(case)
        count = int(torch.randint(1, 60, (), generator=generator))
        mean = 0.3 + 2 * torch.rand((), generator=generator).item()
        valid = torch.rand(count, generator=generator) < 0.8
        group = torch.randint(min(4, count), (count,), generator=generator) * (scope == "sequence")
        subject = router(scope=scope, score_function=scores, experts_per_token=mean)
        hidden = tokens(count, seed=case)

        routing = subject(hidden, valid, **({"sequence": group} if scope == "sequence" else {}))

        logits = hidden @ subject.gate.weight.T
        score = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
        expected = {}
        for one in group.unique().tolist():
            members = [t for t in range(count) if valid[t] and group[t] == one]
            for expert in range(EXPERTS):
                best = sorted(members, key=lambda t: -score[t, expert].item())
                for t in best[: math.floor(len(members) * mean / EXPERTS)]:
                    expected[t, expert] = score[t, expert].item()
        assert pairs(routing) == pytest.approx(expected, rel=1e-5)


def test_number_of_assignments_does_not_depend_on_data():
    subject = router(experts_per_token=2.5)
    lengths = {
        len(subject(tokens(48, seed), torch.arange(48) >= padding, sequence=torch.arange(48) // length).token)
        for seed, padding, length in ((0, 0, 48), (1, 30, 7), (2, 48, 1))
    }

    assert lengths == {20 * EXPERTS}


def test_a_long_decimal_is_what_was_meant():
    """16 digits times a thousand tokens do not fit 64 bits."""
    routing = router(scope="batch", experts_per_token=4 / 3)(tokens(1350))

    assert torch.bincount(routing.expert).tolist() == [300] * EXPERTS


def test_the_load_is_even():
    routing = router(scope="batch")(tokens(60))

    assert torch.bincount(routing.expert).tolist() == [20] * EXPERTS


def test_equal_scores_go_by_position():
    ranks = ranks_in_group(torch.ones(6, 2), torch.tensor([3, 1, 3, 1, 1, 3]))

    assert ranks[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_sequences_do_not_see_each_other():
    subject = router()
    hidden, sequence = tokens(60), torch.arange(60) // 20
    whole = pairs(subject(hidden, sequence=sequence))

    alone = pairs(subject(hidden[20:40], sequence=sequence[:20]))

    assert {(token + 20, expert) for token, expert in alone} == {pair for pair in whole if 20 <= pair[0] < 40}


class TestInference:
    def test_there_is_none_without_a_predictor(self):
        assert not router().causal
        assert router().inference_router() is None

    def test_predictor_learns_what_experts_choose(self):
        subject = router(scope="batch", predictor=True)
        optimizer = torch.optim.Adam([subject.predictor.weight], lr=0.05)
        for step in range(300):
            subject(tokens(240, seed=step)).auxiliary["expert_prediction"].div(240).backward()
            optimizer.step()
            optimizer.zero_grad()
        hidden = tokens(240, seed=1000)

        chosen, predicted = pairs(subject(hidden)).keys(), pairs(subject.inference_router()(hidden)).keys()

        assert subject.inference_router().causal
        wrong = len(chosen ^ predicted) / (240 * EXPERTS)
        assert wrong < 0.22  # a third is chosen, so that to predict none errs 0.33

    def test_predicted_weights_are_the_scores(self):
        subject = router(predictor=True).eval()
        hidden = tokens(20)

        predicted = pairs(subject.inference_router()(hidden))

        score = (hidden @ subject.gate.weight.T).softmax(-1)
        assert len(predicted) > 10
        assert predicted == pytest.approx({pair: score[pair].item() for pair in predicted}, rel=1e-5)

    def test_a_token_is_predicted_by_itself(self):
        subject = router(predictor=True).eval().inference_router()
        hidden = tokens(20)

        assert {expert for token, expert in pairs(subject(hidden)) if token == 7} == {
            expert for _, expert in pairs(subject(hidden[7:8]))
        }

    def test_prediction_teaches_nothing_but_the_predictor(self):
        subject, hidden = router(scope="batch", predictor=True), tokens(60).requires_grad_()

        subject(hidden).auxiliary["expert_prediction"].backward()

        assert subject.predictor.weight.grad.any()
        assert subject.gate.weight.grad is None
        assert hidden.grad is None

    def test_padding_is_not_predicted(self):
        subject, valid = router(predictor=True).inference_router(), torch.arange(20) % 2 == 0

        assert {token % 2 for token, _ in pairs(subject(tokens(20), valid))} == {0}


def test_tokens_that_no_expert_takes_are_reported():
    """Documents of 2, of which an expert takes 2 · 2 / 6, none; of 12, of which it takes 4; and padding."""
    subject = router()
    hidden, valid = tokens(20).requires_grad_(), torch.arange(20) < 18
    sequence = torch.tensor([0] * 2 + [2] * 2 + [4] * 2 + [6] * 12 + [18] * 2)

    routing = subject(hidden, valid, sequence=sequence)
    routing.weight.sum().backward()
    subject.before_optimizer_step(subject.accumulators(), 0.5)

    alone = set(range(18)) - {token for token, _ in pairs(routing)}
    assert alone >= {0, 1, 2, 3, 4, 5}
    assert subject.step_metrics()["router_passed_over"].item() == pytest.approx(len(alone) / 18)


def test_refuses_more_experts_a_token_than_there_are():
    with pytest.raises(ConfigError, match=r"router\.experts_per_token: 6\.5 experts a token are more than the 6"):
        router(experts_per_token=6.5)


NOISE = torch.randint(2**62, (4096,), generator=torch.Generator().manual_seed(3))


def test_noise_is_the_difference_of_two_draws_of_gumbels_distribution():
    drawn = gumbel_difference(NOISE, EXPERTS).double()
    generator = torch.Generator().manual_seed(0)
    first, second = (-(-torch.rand(drawn.shape, dtype=torch.float64, generator=generator).log()).log() for _ in "ab")

    assert drawn.isfinite().all()
    assert drawn.mean().abs() < 4 * math.pi / math.sqrt(3 * drawn.numel())
    assert drawn.var().item() == pytest.approx(math.pi**2 / 3, rel=0.04)
    quantiles = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    torch.testing.assert_close(
        drawn.flatten().quantile(quantiles), (first - second).flatten().quantile(quantiles), atol=0.08, rtol=0
    )
    assert torch.corrcoef(drawn.T).triu(1).abs().max() < 0.08, "experts have draws of their own"


def test_noisy_scores_are_those_of_the_formula_and_decide_who_is_taken():
    subject, hidden = router(score_function="sigmoid", scope="batch", gumbel_noise=True), tokens(48)
    noise = NOISE[:48]

    routing = subject(hidden, noise=noise)

    score = (hidden @ subject.gate.weight.T + gumbel_difference(noise, EXPERTS)).sigmoid()
    expected = {(t, e): score[t, e].item() for e in range(EXPERTS) for t in score[:, e].topk(16).indices.tolist()}
    assert pairs(routing) == pytest.approx(expected, rel=1e-5)
    plain = router(score_function="sigmoid", scope="batch")
    assert pairs(plain(hidden)).keys() != expected.keys()
    subject.eval()
    assert pairs(subject(hidden, noise=noise)) == pairs(plain.eval()(hidden))


def test_a_token_has_its_noise_wherever_it_is():
    order = torch.randperm(len(NOISE), generator=torch.Generator().manual_seed(1))

    assert torch.equal(gumbel_difference(NOISE[order], EXPERTS), gumbel_difference(NOISE, EXPERTS)[order])


def test_noise_is_for_scores_by_sigmoid():
    with pytest.raises(ValueError, match="is for score_function = \"sigmoid\", and it is 'softmax'"):
        ExpertChoiceConfig(gumbel_noise=True)
