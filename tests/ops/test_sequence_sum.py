from types import SimpleNamespace

import torch

from forge_core.ops.sequence_sum import number_sequences, share_out_positions, sum_by_sequence


def test_each_token_gets_the_sum_of_its_sequence():
    values = torch.arange(12.0).view(6, 2)
    sequence = torch.tensor([0, 0, 3, 3, 3, 5])

    sums = sum_by_sequence(values, sequence)

    assert sums.tolist() == [[2, 4], [2, 4], [18, 21], [18, 21], [18, 21], [10, 11]]


def test_rows_are_sequences_and_documents_are_apart_in_them():
    like = torch.zeros(2, 4, 8)
    document = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]])

    assert number_sequences(None, like).tolist() == [[0] * 4, [4] * 4]
    assert number_sequences(document, like).tolist() == [[0, 0, 1, 1], [4, 5, 6, 6]]


def test_documents_of_two_rows_are_apart_where_ranks_share_them():
    share_out_positions(SimpleNamespace(size=lambda: 2))
    try:
        numbers = number_sequences(torch.tensor([[0, 0, 6, 7], [0, 1, 1, 7]]), torch.zeros(2, 4, 8))
    finally:
        share_out_positions(None)

    assert numbers.tolist() == [[0, 0, 6, 7], [8, 9, 9, 15]]


def test_the_gradient_does_not_pass():
    values = torch.ones(3, 2, requires_grad=True)

    assert not sum_by_sequence(values, torch.zeros(3, dtype=torch.int64)).requires_grad
