from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_moe.router_config import HashConfig
from forge_plugins_moe.routers.expert_table import deal_out, read_expert_table
from forge_plugins_moe.routers.hash import hash_router

EXPERTS = 8


def router(seed: int = 0, prefix: str = "", n_experts: int = EXPERTS, **keys: Any) -> Any:
    router = hash_router(HashConfig(**keys), dim=4, n_experts=n_experts)
    router.init_weights(SeededInitializer(seed), prefix, 0.5)
    return router


def experts_of(router: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """``(T, K)``."""
    expert: torch.Tensor = router(torch.randn(len(token_ids), 4), token_ids=token_ids).expert
    return expert.view(len(token_ids), -1)


@pytest.mark.parametrize("table", ["balanced", "random"])
class TestHashFunction:
    def test_a_token_id_decides(self, table):
        subject, ids = router(table=table, top_k=3), torch.randint(10**6, (100,))

        assert torch.equal(experts_of(subject, ids), experts_of(subject, ids.flip(0)).flip(0))

    def test_experts_of_an_id_differ(self, table):
        experts = experts_of(router(table=table, top_k=5), torch.arange(1000)).sort(-1).values

        assert (experts[:, 1:] > experts[:, :-1]).all()

    def test_every_layer_and_seed_has_another(self, table):
        ids = torch.arange(1000)
        first = experts_of(router(table=table), ids)

        for other in (router(table=table, prefix="blocks.1."), router(1, table=table)):
            assert 0.8 < (experts_of(other, ids) != first).float().mean() < 0.95  # 7 of 8 by chance

    def test_experts_have_about_as_many_ids(self, table):
        experts = experts_of(router(table=table), torch.arange(80_000))

        loads = torch.bincount(experts.flatten(), minlength=EXPERTS)
        assert (loads - 10_000).abs().max() <= (0 if table == "balanced" else 500)

    def test_ids_do_not_follow_each_other(self, table):
        """The experts of neighbouring ids are as good as independent beyond a block."""
        experts = experts_of(router(table=table), torch.arange(80_000)).flatten()

        equal = (experts[8:] == experts[:-8]).float().mean()
        assert equal.item() == pytest.approx(1 / 8, abs=0.01)


def test_balanced_ids_of_a_block_share_out_all_experts():
    experts = experts_of(router(top_k=3), torch.arange(800)).view(100, 8, 3)

    assert all(torch.bincount(block.flatten(), minlength=8).tolist() == [3] * 8 for block in experts)


def test_equal_weights():
    routing = router(top_k=4)(torch.randn(5, 4), token_ids=torch.arange(5))

    assert routing.weight.tolist() == [0.25] * 20


def test_a_gate_weighs_and_does_not_choose():
    plain, gated = router(top_k=2), router(top_k=2, weights="gate", score_function="sigmoid", route_scale=1.5)
    gated.table.salt.copy_(plain.table.salt)
    hidden, ids = torch.randn(50, 4), torch.arange(50)

    routing = gated(hidden, token_ids=ids)

    assert torch.equal(routing.expert.view(-1, 2), experts_of(plain, ids))
    score = (hidden @ gated.gate.weight.T).sigmoid().gather(1, routing.expert.view(-1, 2))
    torch.testing.assert_close(routing.weight.view(-1, 2), 1.5 * score / score.sum(-1, keepdim=True))


class TestFile:
    def write(self, folder, content):
        file = folder / "table.npy"
        np.save(file, np.array(content))
        return file

    def test_frequent_ids_are_dealt_out_first(self):
        """Loads after each: 0 → (9, 0, 0), 2 → (9, 5, 0), 1 → (9, 5, 4), 4 → (9, 5, 7), 3 → (9, 6, 7)."""
        assert deal_out(np.array([9, 4, 5, 1, 3]), 3, 1).flatten().tolist() == [0, 2, 1, 1, 2]

    def test_loads_are_as_even_as_greedy_can(self):
        counts = (1e6 / np.arange(1, 5001)).astype(np.int64)
        table = deal_out(counts, EXPERTS, 2)

        loads = np.bincount(table.flatten(), np.repeat(counts, 2), minlength=EXPERTS)
        assert loads.max() / loads.mean() < 1.001
        assert (table[:, 0] != table[:, 1]).all()

    def test_ids_that_never_occur_are_shared_out_too(self):
        assert np.bincount(deal_out(np.zeros(80, dtype=int), EXPERTS, 1).flatten()).tolist() == [10] * EXPERTS

    def test_a_table_is_taken_as_it_is(self, tmp_path):
        file = self.write(tmp_path, [[0, 3], [7, 1], [2, 4]])

        assert experts_of(router(file=file, top_k=2), torch.tensor([2, 0])).tolist() == [[2, 4], [0, 3]]

    def test_ids_beyond_its_end_go_by_the_hash_function(self, tmp_path):
        file = self.write(tmp_path, [5, 5, 5])
        listed, hashed = router(file=file), router()
        ids = torch.arange(200)

        assert torch.equal(experts_of(listed, ids)[3:], experts_of(hashed, ids)[3:])

    def test_the_table_is_in_the_checkpoint(self, tmp_path):
        subject = router(file=self.write(tmp_path, [5, 4, 3]))

        assert set(subject.state_dict()) == {"table.salt", "table.experts"}

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            ([0.5, 1.0], "must be a .npy file of integers"),
            ([3, -1], "says that id 1 occurs -1 times"),
            ([[1, 2, 3]], r"has the shape \(1, 3\); it must be .*, or \(ids, 2\), its top_k = 2 experts"),
            ([[1, 2], [3, 8]], r"sends id 1 to \[3, 8\]; experts are 0 to 7"),
            ([[1, 2], [5, 5]], r"sends id 1 to an expert twice: \[5, 5\]"),
        ],
    )
    def test_what_it_must_not_hold(self, tmp_path, content, sentence):
        with pytest.raises(ConfigError, match=sentence):
            router(file=self.write(tmp_path, content), top_k=2)

    def test_what_is_no_array_is_refused_without_a_word_of_pickles(self, tmp_path):
        file = tmp_path / "table.npy"
        file.write_text("1, 2, 3")

        with pytest.raises(ConfigError, match=r"router\.file: .*table\.npy must be a \.npy file of integers$"):
            router(file=file)

    def test_a_file_that_is_not_there_is_told_at_validation(self, tmp_path):
        ((key, sentence),) = HashConfig(file=tmp_path / "none.npy").contradictions(EXPERTS)

        assert (key, sentence) == (
            "file",
            f"there is no file {tmp_path / 'none.npy'} (from the folder in which forge was started)",
        )

    @pytest.mark.parametrize("file", ["~no-such-user/x.npy", "x" * 300])
    def test_nor_is_one_whose_name_means_nothing(self, file):
        ((key, sentence),) = HashConfig(file=Path(file)).contradictions(EXPERTS)

        assert (key, sentence.partition(" (")[0]) == ("file", f"there is no file {file}")

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"router\.file: cannot read"):
            read_expert_table(tmp_path / "none.npy", EXPERTS, 1)


def test_refuses_more_experts_than_there_are():
    with pytest.raises(ConfigError, match=r"router\.top_k: 9 experts a token are more than the 8"):
        router(top_k=9)
