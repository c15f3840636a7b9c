import pytest
import torch
from relu_router.config import ReluRouterConfig

from forge_testing.router import RouterConformance


class TestOneExpert(RouterConformance):
    component = "relu-router:relu_router"


class TestTwoExperts(RouterConformance):
    component = "relu-router:relu_router"
    config = {"experts_per_token": 2, "growth": 1.5, "first_penalty": 0.01}


def build(**config: float):
    class Case(RouterConformance):
        component = "relu-router:relu_router"

    Case.config = config
    return Case().build_router()


def hidden(n: int = 64) -> torch.Tensor:
    return torch.randn(n, RouterConformance.dim, generator=torch.Generator().manual_seed(0))


def test_a_token_visits_the_experts_with_a_positive_score_and_is_weighted_by_it() -> None:
    router, tokens = build(), hidden()

    routing = router(tokens)

    scores = (tokens.double() @ router.gate.weight.double().T).relu()
    dense = torch.zeros(len(tokens), 9, dtype=torch.float64)
    dense[routing.token, routing.expert] = routing.weight.double()
    torch.testing.assert_close(dense[:, :8], scores, rtol=1e-5, atol=1e-6)
    assert (routing.expert < 8).sum() == (scores > 0).sum()


def test_the_loss_is_that_of_the_paper_times_the_tokens() -> None:
    """L = λ · 1/T · Σ f_e R(x_t)_e with f_e = E / (k T) · Σ 1[R(x_t)_e > 0], of one layer."""
    router, tokens = build(experts_per_token=2, first_penalty=0.01, growth=1.5), hidden()
    scores = (tokens.double() @ router.gate.weight.double().T).relu()
    visits = (scores > 0).double().sum(0)

    router.before_optimizer_step({"visits": torch.cat([visits.float(), torch.tensor([64.0])])}, 0.5)

    popularity = 8 / (2 * 64) * visits
    expected = 0.015 * (popularity * scores).sum()  # more than two experts a token: λ has grown
    torch.testing.assert_close(router(tokens).auxiliary["sparsity"].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("visits", "factor"), [(3.0, 1.5), (1.0, 1 / 1.5), (2.0, 1.0)])
def test_the_coefficient_follows_the_sign_of_what_is_too_much(visits: float, factor: float) -> None:
    router = build(experts_per_token=2, first_penalty=0.01, growth=1.5)

    router.before_optimizer_step({"visits": torch.tensor([10 * visits] + 7 * [0.0] + [10.0])}, 0.5)

    assert router.penalty.item() == pytest.approx(0.01 * factor)
    assert router.step_metrics()["router_visits"].item() == visits


def test_a_token_cannot_visit_all_experts() -> None:
    assert [key for key, _ in ReluRouterConfig(experts_per_token=8).contradictions(8)] == ["experts_per_token"]
    assert not [*ReluRouterConfig(experts_per_token=7.5).contradictions(8)]
