"""What a run reports of losses beside the task's. How they are attached is tested in tests/engine."""

import math

import pytest

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
