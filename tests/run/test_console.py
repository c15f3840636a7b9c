"""What a person sees of a run."""

from types import SimpleNamespace

import pytest

from forge_core.run.console import Console

METRICS = {"loss": 2.5, "grad_norm": 1.25, "lr": 1e-3, "tokens_per_second": 12_345.0, "step_seconds": 0.5, "mfu": 0.4}
WHOLE = "step 7/9  loss 2.5000  grad_norm 1.250  lr 1.00e-03  12,345 tokens/s  0.500 s/step  mfu 40.0%"


@pytest.mark.parametrize(
    ("width", "shown"), [(200, WHOLE), (60, "step 7/9  loss 2.5000  grad_norm 1.250  lr 1.00e-03"), (3, "step 7/9")]
)
def test_a_step_s_line_ends_with_a_whole_figure_on_a_narrow_terminal(monkeypatch, capsys, width, shown):
    recorded: list[str] = []
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console(speaks=True, record=recorded.append)

    console.step_logged(SimpleNamespace(total_steps=9), 7, METRICS)

    assert capsys.readouterr().out.strip() == shown
    assert recorded == [WHOLE]


def test_a_step_without_targets_is_told(capsys):
    Console(speaks=True, record=lambda line: None).step_logged(
        SimpleNamespace(total_steps=9), 7, METRICS | {"loss": 0.0, "targets": 0}
    )

    assert capsys.readouterr().out.startswith("step 7/9  no targets to learn from  grad_norm")
