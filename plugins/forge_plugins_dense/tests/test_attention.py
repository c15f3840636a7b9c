from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from forge_core.errors import ConfigError
from forge_plugins_dense import attention
from forge_plugins_dense.attention import attend
from forge_plugins_dense.layer_config import LayerConfig
from forge_plugins_dense.mask import BLOCK, cache_mask, causal_mask, document_block_mask, document_mask

BLOCK_LISTS = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14, [5] * 3 + [2] * 20 + [9]])


def restarted(document: torch.Tensor) -> torch.Tensor:
    """Positions that start at 0 in each document."""
    first = torch.stack([torch.stack([(row == at).nonzero()[0, 0] for at in row]) for row in document])
    return torch.arange(document.shape[1]) - first


@torch.no_grad()
def test_another_document_changes_nothing(tiny_model, tokens):
    model = tiny_model()
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50

    before, after = (model(batch, document=DOCUMENTS) for batch in (tokens, changed))

    torch.testing.assert_close(before[0, :10], after[0, :10], rtol=0, atol=0)
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=0)
    assert not torch.isclose(before[0, 10:], after[0, 10:]).all(dim=-1).any()


@torch.no_grad()
def test_an_earlier_document_changes_nothing(tiny_model, tokens):
    model = tiny_model()
    changed = tokens.clone()
    changed[0, :10] = (changed[0, :10] + 1) % 50

    before, after = (model(batch, document=DOCUMENTS) for batch in (tokens, changed))

    torch.testing.assert_close(before[0, 10:], after[0, 10:], rtol=0, atol=0)


def test_packed_documents_are_as_if_each_were_alone_forward_and_backward(tiny_model, tokens):
    packed, alone = tiny_model(), tiny_model()

    logits = packed(tokens, document=DOCUMENTS, positions=restarted(DOCUMENTS))
    logits.square().sum().backward()
    separate = torch.empty_like(logits)
    for row, documents in enumerate(DOCUMENTS):
        for document in documents.unique():
            inside = documents == document
            separate[row, inside] = alone(tokens[row, inside][None])[0]
    separate.square().sum().backward()

    torch.testing.assert_close(logits, separate, atol=1e-5, rtol=1e-5)
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-4, rtol=1e-4, msg=name)


@torch.no_grad()
def test_rows_of_one_document_are_plain_causal_attention(tiny_model, tokens):
    model = tiny_model()
    one = torch.tensor([[3], [8]]).expand(2, 24)
    torch.testing.assert_close(model(tokens, document=one), model(tokens), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_grouped_heads_equal_repeated_ones(tiny_model):
    q, k, v = (torch.randn(2, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    grouped = attend(q, k, v, None, True, "auto")
    repeated = attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), None, True, "auto")
    torch.testing.assert_close(grouped, repeated)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_chosen_kernel_gives_the_same_logits(tiny_model, tokens, backend):
    chosen = tiny_model(attention=backend)
    for inputs in ({}, {"document": DOCUMENTS}):
        torch.testing.assert_close(chosen(tokens, **inputs), tiny_model()(tokens, **inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["efficient", "cudnn", "flex"])
def test_a_kernel_that_needs_cuda_says_so(tiny_model, tokens, backend):
    with pytest.raises(ConfigError, match=f'"{backend}" needs CUDA, and this model is on cpu'):
        tiny_model(attention=backend, n_kv_heads=4, head_dim=16)(tokens)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math", "flex"])
def test_every_kernel_on_cuda_agrees_with_the_cpu(tiny_model, tokens, backend):
    exact = tiny_model(head_dim=16, n_kv_heads=4)
    model = tiny_model(head_dim=16, n_kv_heads=4, attention=backend).to("cuda", torch.bfloat16)
    for document in (None, DOCUMENTS):
        if backend == "flash" and document is not None:
            with pytest.raises(ConfigError, match='"flash" cannot keep packed documents apart'):
                model(tokens.cuda(), document=document.cuda())
            continue
        logits = model(tokens.cuda(), document=None if document is None else document.cuda()).float().cpu()
        difference = logits - exact(tokens, document=document)
        assert difference.std() < 0.03 * logits.std()


@pytest.mark.parametrize("window", [0, 1, 60, 128, 300])
@pytest.mark.parametrize("seq_len", [50, 128, 300, 384])
def test_the_block_mask_is_the_document_mask(seq_len, window):
    generator = torch.Generator().manual_seed(seq_len)
    ends = torch.randint(4, (3, seq_len), generator=generator) * torch.rand(3, seq_len, generator=generator) // 2.9
    document = (ends.cumsum(1) * torch.tensor([[1], [-1], [0]])).long()  # ids that rise, fall, and stay

    mask = document_block_mask(document, window)

    elements = torch.zeros(3, 1, seq_len, seq_len, dtype=torch.bool)
    index = torch.arange(seq_len)
    seen = mask.mask_mod(torch.arange(3)[:, None, None], 0, index[:, None], index).unsqueeze(1)
    for counts, columns, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for row, _, tile in torch.cartesian_prod(torch.arange(3), torch.zeros(1).long(), torch.arange(counts.shape[2])):
            for column in columns[row, 0, tile, : counts[row, 0, tile]]:
                where = (row, 0, slice(tile * BLOCK, (tile + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                elements[where] = True if whole else seen[where]
    torch.testing.assert_close(elements, document_mask(document, window))
    transposed = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=BLOCK
    )
    for name in BLOCK_LISTS:  # the backward pass reads the lists of queries, and reads them as they lie in memory
        assert torch.equal(getattr(mask, name), getattr(transposed, name)), name
        assert getattr(mask, name).is_contiguous(), name
    if seq_len == 384:  # below the diagonal, one document is seen tile by tile, as far as the window reaches
        assert mask.full_kv_num_blocks[2].sum() == {0: 3, 300: 2}.get(window, 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own; it hides it, but pytest's "error" comes first
@pytest.mark.parametrize("seq_len", [200, 512])
def test_documents_on_cuda_are_as_on_the_cpu(tiny_model, seq_len):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, seq_len), generator=generator)
    document = (torch.rand(2, seq_len, generator=generator) < 0.02).cumsum(1)
    results = []
    for device in ("cpu", "cuda"):
        model = tiny_model(max_seq_len=512, head_dim=16)
        model.to(device)
        logits = model(tokens.to(device), document=document.to(device))
        logits.square().mean().backward()
        results.append([logits.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[24], [1] * 24, [7, 1, 16], [16, 8]])
def test_a_prompt_in_chunks_of_any_length_gives_the_logits_of_one_forward(tiny_model, tokens, chunks):
    model = tiny_model()
    cache = model.make_cache(2, 30)

    pieces = [model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)]

    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[24], [5, 11, 8], [1] * 24])
def test_left_padded_rows_give_the_logits_of_single_rows(tiny_model, tokens, chunks):
    model = tiny_model()
    padding = torch.tensor([[0], [9]])
    positions = (torch.arange(24) - padding).clamp(min=-1)
    cache = model.make_cache(2, 24)

    pieces = [
        model(chunk, positions=where, cache=cache)
        for chunk, where in zip(tokens.split(chunks, dim=1), positions.split(chunks, dim=1), strict=True)
    ]

    batch = torch.cat(pieces, dim=1)
    assert batch.isfinite().all()
    torch.testing.assert_close(batch[:1], model(tokens[:1]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch[1:, 9:], model(tokens[1:, 9:]), atol=1e-5, rtol=1e-5)


def test_the_causal_triangle_of_a_later_chunk_ends_at_the_bottom_right():
    mask = cache_mask(2, 5, None, torch.device("cpu"))[0, 0]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_misuse_of_the_cache_is_told(tiny_model, tokens):
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"longer than model\.max_seq_len = 64"):
        model.make_cache(2, 65)
    with pytest.raises(ValueError, match="no room for 2 × 24"):
        model(tokens, cache=model.make_cache(2, 20))
    with pytest.raises(ValueError, match="documents"):
        model(tokens, cache=model.make_cache(2, 24), document=DOCUMENTS)
    cache = model.make_cache(2, 30)
    model(tokens, positions=torch.arange(24).expand(2, 24), cache=cache)
    with pytest.raises(ValueError, match="positions must be given"):
        model(tokens[:, :1], cache=cache)


def test_a_window_is_the_query_and_the_positions_right_before_it():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(causal_mask(4, 2, torch.device("cpu")), expected)
    assert torch.equal(document_mask(torch.zeros(1, 4), 2)[0, 0], expected)
    assert torch.equal(cache_mask(1, 4, None, torch.device("cpu"), 2)[0, 0], expected[1:])


@torch.no_grad()
def test_a_window_as_long_as_the_sequence_changes_nothing(tiny_model, tokens):
    logits = tiny_model()(tokens)
    torch.testing.assert_close(tiny_model(window=24)(tokens), logits, rtol=0, atol=0)
    assert not torch.allclose(tiny_model(window=23)(tokens)[:, -1], logits[:, -1])


@torch.no_grad()
def test_two_layers_with_a_window_see_twice_as_far(tiny_model, tokens):
    model = tiny_model(window=4)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 50

    differs = (model(tokens) - model(changed)).abs().amax((0, 2)) > 1e-6

    assert differs.nonzero().flatten().tolist() == list(range(5, 12))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_capped_attention_is_the_formula_in_float64(window, heads):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, heads, 9, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = causal_mask(9, window, torch.device("cpu"))
    given = (None, True) if window == 0 else (mask[None, None], False)

    found = attend(q.float(), k.float(), v.float(), *given, "auto", softcap=0.7)

    repeated = [one.repeat_interleave(4 // heads, dim=1) for one in (k, v)]
    logits = 0.7 * torch.tanh(q @ repeated[0].mT / 8**0.5 / 0.7)
    expected = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ repeated[1]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), weights.float()),
        torch.autograd.grad(expected, (q, k, v), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize(
    "keys",
    [
        {"window": 5},
        {"attention_softcap": 1.0},
        {"window": 5, "attention_softcap": 1.0},
        {"attention_sinks": True},
        {"window": 5, "attention_sinks": True},
    ],
)
def test_windows_caps_and_sinks_on_cuda_are_as_on_the_cpu(tiny_model, tokens, keys):
    model = tiny_model(**keys)
    expected = model(tokens)
    torch.testing.assert_close(model.to("cuda")(tokens.cuda()).cpu(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_beside_sinks_is_the_formula_in_float64(softcap, window, heads):
    q, k, v, sinks = drawn(heads)
    mask = causal_mask(9, window, torch.device("cpu"))
    given = (None, True) if window == 0 else (mask[None, None], False)

    found = attend(q.float(), k.float(), v.float(), *given, "auto", softcap=softcap, sinks=sinks.float())

    expected = with_sinks(q, k, v, mask, sinks, softcap)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v, sinks), weights.float()),
        torch.autograd.grad(expected, (q, k, v, sinks), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()  # on the CPU it has no backward
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_flex_attention_beside_sinks_is_the_formula_too(softcap, monkeypatch):
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: attention.flex_attention)
    q, k, v, sinks = drawn(2, size=16)
    document = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])

    found = attend(q.float(), k.float(), v.float(), document_block_mask(document, 3), False, "flex", softcap, sinks)

    expected = with_sinks(q, k, v, document_mask(document, 3), sinks, softcap)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def drawn(kv_heads, size=8):
    """Queries, keys, values and sinks of two rows of nine positions, four heads."""
    rng = torch.Generator().manual_seed(0)
    shapes = (2, 4, 9, size), (2, kv_heads, 9, size), (2, kv_heads, 9, size), (4,)
    return [torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for shape in shapes]


def with_sinks(q, k, v, mask, sinks, softcap):
    """As gpt-oss has it: one more logit in the softmax, which is then left out."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    more = sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits.masked_fill(~mask, -torch.inf), more), dim=-1).softmax(-1)[..., :-1] @ v


@torch.no_grad()
def test_sinks_are_in_the_layers_that_are_asked_for_and_change_them(tiny_model, tokens):
    model = tiny_model(layers=(LayerConfig(at=1, attention_sinks=True),))
    without, plain = model(tokens), tiny_model()

    assert [name for name, _ in model.named_parameters() if "sinks" in name] == ["blocks.1.attention.sinks.bias"]
    model.blocks["1"].attention.sinks.bias.fill_(-1e4)  # nothing is left for them
    torch.testing.assert_close(model(tokens), plain(tokens), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(without, plain(tokens), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_chosen_kernel_gives_the_same_logits_beside_sinks(tiny_model, tokens, backend):
    chosen = tiny_model(attention=backend, attention_sinks=True)
    for inputs in ({}, {"document": DOCUMENTS}):
        expected = tiny_model(attention_sinks=True)(tokens, **inputs)
        torch.testing.assert_close(chosen(tokens, **inputs), expected, atol=1e-5, rtol=1e-5)
