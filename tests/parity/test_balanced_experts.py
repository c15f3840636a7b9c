"""On a text that sends most tokens to few experts, balancing evens the load out in a training of two processes.

By day, forge_plugins_moe/tests/test_router_balancing.py has one process."""

import random

import pytest

from parity_matrix.cells import AC, FSDP
from parity_matrix.launch import Launcher, Work
from parity_matrix.selection import selected_cells

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROUTERS = {  # steps, and the router
    "unbalanced": (80, 'name="softmax_topk", balance=0.0'),
    "unbalanced-sigmoid": (80, 'name="sigmoid_topk", bias_rate=0.0'),
    "bias-ac": (200, 'name="sigmoid_topk", bias_rate=0.003'),
    "loss": (200, 'name="softmax_topk", balance=0.1'),
}


@pytest.fixture(scope="module")
def launcher(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("balance")
    _write_skewed_text(folder / "skewed")
    launcher = Launcher(folder)
    chosen = selected_cells(request)
    launcher.launch(
        [Work(name, 2, _settings(name, *of)) for name, of in ROUTERS.items() if name in chosen], timeout=800
    )
    return launcher


def _write_skewed_text(folder):
    """200 words, of which the n-th is n times as rare as the first."""
    chosen = random.Random(0)
    words = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(2, 7))) for _ in range(200)]
    folder.mkdir()
    for file in range(20):
        text = chosen.choices(words, [1 / rank for rank in range(1, 201)], k=3000)
        (folder / f"{file}.txt").write_text(" ".join(text))


def _settings(name, steps, router):
    settings = [
        *("model.n_layers=2", "model.n_heads=4", "data.path=skewed", "eval.interval=0", "optimizer.lr=1e-3"),
        *(f"train.steps={steps}", "train.seq_len=64", "train.batch_size=8", "scheduler.warmup_steps=20"),
        f'model.feed_forward={{name="moe", n_experts=8, hidden_dim=32, router={{{router}}}}}',
        f"{FSDP}=true",
    ]
    return [*settings, f"{AC}=true"] if name.endswith("-ac") else settings


def _violation(launcher, name):
    """Of the worse layer, the mean over the last 20 steps."""
    last = [line for line in launcher.metrics(name) if "loss" in line][-20:]
    layers = [key for key in last[0] if key.startswith("load_violation/")]
    assert (len(layers), last[-1]["step"]) == (2, ROUTERS[name][0])
    return max(sum(line[layer] for line in last) / len(last) for layer in layers)


@pytest.mark.parametrize("cell", ["unbalanced", "unbalanced-sigmoid"])
def test_without_balancing_it_stays_uneven(launcher, cell):
    assert _violation(launcher, cell) > 0.5


@pytest.mark.parametrize("cell", ["bias-ac", "loss"])
def test_with_balancing_it_evens_out(launcher, cell):
    assert _violation(launcher, cell) < 0.2
