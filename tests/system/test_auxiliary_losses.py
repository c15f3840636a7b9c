"""What a run reports of losses beside the task's. How they are attached is tested in tests/ops."""

import math

import numpy as np
import pytest

from forge_plugins_data.windows import TokenWindows

ROUTER = '{name="softmax_topk", top_k=2, z_loss=1.0}'
# logits are so small that of each token the z-loss is log(4)², in each of two layers
SPARSE = [f'model.feed_forward={{name="moe", n_experts=4, hidden_dim=16, router={ROUTER}}}', "model.init_std=1e-6"]


@pytest.mark.parametrize("separated", ["true", "false"])
def test_that_of_a_router_is_a_mean_over_tokens_whether_they_have_a_target_or_not(shared_tiny, tmp_path, separated):
    """The last token of a document has none, if documents are kept apart."""
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    documents = [f"data.path={tmp_path}", "data.pattern=*.txt", f"data.document_mask={separated}"]

    lines = shared_tiny.completed(*SPARSE, *documents, f"run.name=separated-{separated}", "train.steps=3")

    assert lines[0]["auxiliary/router_z"] == pytest.approx(2 * math.log(4) ** 2, rel=1e-4)


def test_padding_is_no_token(shared_tiny, monkeypatch):
    """Of each sample of a source that pads, the second half."""
    read = TokenWindows.read

    def padded(self, indices):
        batch = read(self, indices)
        positions = np.broadcast_to(np.arange(batch["tokens"].shape[1]), batch["tokens"].shape)
        there = positions < positions.shape[1] // 2
        batch["positions"] = np.where(there, positions, -1)
        batch["targets"] = np.where(there, batch["targets"], -100)
        return batch

    monkeypatch.setattr(TokenWindows, "read", padded)
    first, *_ = shared_tiny.completed(*SPARSE, "run.name=padded", "train.steps=3")

    assert first["auxiliary/router_z"] == pytest.approx(2 * math.log(4) ** 2, rel=1e-4)
