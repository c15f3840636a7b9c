"""Documents that share a sample, against a loop over tokens."""

import itertools

import numpy as np
import pytest

from forge_plugins_data.packing import document_inputs

END = 7


def reference(tokens):
    """One token at a time."""
    targets, document, positions = [], [], []
    which = position = 0
    for token, following in itertools.pairwise(tokens):
        document.append(which)
        positions.append(position)
        targets.append(-100 if token == END else following)
        which, position = (which + 1, 0) if token == END else (which, position + 1)
    return targets, document, positions


@pytest.mark.parametrize("seed", range(200))
def test_random_documents_are_packed_as_a_loop_would(seed):
    rng = np.random.default_rng(seed)
    rows, length = rng.integers(1, 6), rng.integers(1, 40)
    windows = rng.integers(0, 7, (rows, length + 1))
    windows[rng.random(windows.shape) < rng.choice([0, 0.05, 0.5, 1])] = END
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()

    inputs = document_inputs(tokens, targets, END)

    for row in range(rows):
        expected = reference(windows[row].tolist())
        assert (targets[row].tolist(), inputs["document"][row].tolist(), inputs["positions"][row].tolist()) == expected
    np.testing.assert_array_equal(tokens, windows[:, :-1])
    assert inputs["document"].dtype == inputs["positions"].dtype == np.int64


def test_an_end_belongs_to_its_document_and_two_in_a_row_make_an_empty_one():
    tokens = np.array([[10, 20, END, 30, 40, END, END, 50]])
    targets = np.array([[20, END, 30, 40, END, END, 50, 60]])

    inputs = document_inputs(tokens, targets, END)

    assert inputs["document"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 3]]
    assert inputs["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert targets.tolist() == [[20, END, -100, 40, END, -100, -100, 60]]
