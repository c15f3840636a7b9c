"""Whatever draws random numbers draws others where other tokens are, and the same where ranks compute the same."""

import pytest

PLUGIN = """
    from forge_core.api import Component, hookimpl

    @hookimpl
    def forge_callbacks():
        yield Component(
            name="seeds", summary="for a test", factory="acme_seeds.seeds:Seeds", config="acme_seeds.config:Empty"
        )
"""
CONFIG = """
    import attrs

    @attrs.frozen(kw_only=True)
    class Empty:
        '''Nothing.'''
"""
SEEDS = """
    import torch

    from forge_core.contracts.callback import Callback


    class Seeds(Callback):
        def __init__(self, config):
            pass

        def step_end(self, run, context):
            with (run.run_dir / f"seeds_{run.rank}.txt").open("a") as file:
                file.write(f"{torch.initial_seed()}\\n")
"""
POSITIONS = ["parallel.cp=2", "parallel.ep=2", "model.num_experts=4", "model.moe.hidden_dim=16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mesh", "are_equal"), [(POSITIONS, "cp 2, ep 2", False), (["parallel.tp=2"], "tp 2", True)]
)
def test_ranks_draw_others_for_other_positions_and_the_same_for_other_features(
    tiny, make_distribution, monkeypatch, layout, mesh, are_equal
):
    files = {"acme_seeds/plugin.py": PLUGIN, "acme_seeds/config.py": CONFIG, "acme_seeds/seeds.py": SEEDS}
    monkeypatch.setenv("PYTHONPATH", str(make_distribution("acme-seeds", files=files)))

    done = tiny.run("--nproc", "2", "train.steps=3", 'callbacks=["seeds"]', *layout)

    assert done.returncode == 0, done.stderr
    assert f"on cpu, {mesh}; 3 steps" in done.stdout  # ranks of ep are others' too, and told all the same
    one, other = ((tiny.path() / f"seeds_{rank}.txt").read_text().split() for rank in range(2))
    assert len({*one}) == len({*other}) == 3
    assert (one == other) if are_equal else not {*one} & {*other}
