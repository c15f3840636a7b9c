"""Sources without tokens are counted by an entry of theirs."""

import numpy as np

from forge_core.contracts.loss import IGNORED
from forge_core.data.counts import with_counts


def test_positions_of_the_entry_are_tokens_0_and_targets_but_for_padding():
    batch = {"patches": np.ones((2, 3, 4)), "positions": np.array([[0, 1, -1], [0, 1, 2]])}

    counted = with_counts(batch, "patches")

    assert counted["tokens"].dtype == np.int64
    assert counted["tokens"].tolist() == [[0] * 3] * 2
    assert counted["targets"].tolist() == [[0, 0, IGNORED], [0, 0, 0]]
    assert counted.keys() == {"tokens", "targets", *batch}


def test_without_positions_all_are_targets_in_memory_of_their_own():
    counted = with_counts({"patches": np.ones((2, 3, 4))}, "patches")

    assert counted["targets"].tolist() == [[0] * 3] * 2
    assert not np.shares_memory(counted["tokens"], counted["targets"])
