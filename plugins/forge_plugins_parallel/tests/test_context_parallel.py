"""Context parallelism on one rank: the masks, the part of a batch that a rank takes, and a model known by its plan."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from forge_core.contracts.batch import KNOWN, Entry
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.errors import ConfigError
from forge_plugins_parallel.config import ContextParallelConfig
from forge_plugins_parallel.context_mask import TILE, block_mask, dense_mask
from forge_plugins_parallel.context_parallel import ContextParallel, SequencePart, position_dims
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.small_model import SmallBlock, SmallModel, small_job


class Look(nn.Module):
    def forward(self, q, k, v, visible, sharpness):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=sharpness)


class ForeignBlock(SmallBlock):
    def __init__(self, dim):
        super().__init__(dim)
        self.look = Look()

    def forward(self, hidden, visible):
        normed = self.attention_norm(hidden)
        q, k, v = (part(normed)[:, None] for part in (self.query, self.key, self.value))
        hidden = hidden + self.output(self.look(q, k, v, visible, 0.5)[:, 0])
        return hidden + self.down(F.gelu(self.up(self.up_norm(hidden))))


class ForeignModel(SmallModel):
    """Of another make: its attention has other names and a scale of its own, and its positions are waves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(layer): ForeignBlock(self.dim) for layer in range(self.n_layers)})

    def context_plan(self):
        return [f"blocks.{layer}.look" for layer in self.blocks]

    def forward(self, tokens, targets=None, loss=None, *, positions=None, document=None, mask=None):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        if positions is None:
            positions = place[None]
        if mask is None:
            mask = (place[:, None] >= place)[None, None]
            if document is not None:
                mask = mask & (document[:, None, :, None] == document[:, None, None, :])
        hidden = self.embed(tokens) + positions[..., None].sin()
        for block in self.blocks.values():
            hidden = block(hidden, mask)
        hidden = self.norm(hidden)
        return self.head(hidden) if loss is None else loss(hidden, self.head, targets)


class TestContextParallel(ParallelPassConformance):
    component = "forge-plugins-parallel:context_parallel"

    def make_model(self):
        return ForeignModel()

    def test_a_model_that_does_not_name_its_attention_is_refused(self):
        job = small_job()
        context = PassContext(build_mesh(job, torch.device("cpu")), job, torch.device("cpu"))

        with pytest.raises(ConfigError, match="does not say which of its modules compute attention"):
            ContextParallel(ContextParallelConfig()).apply(SmallModel(), context)

    def test_data_that_do_not_describe_an_entry_are_refused(self):
        job, entries = small_job(), {"tokens": KNOWN["tokens"], "image": None}
        context = PassContext(build_mesh(job, torch.device("cpu")), job, torch.device("cpu"), entries=entries)

        with pytest.raises(ConfigError, match=r"parallel\.cp: the data do not describe the entry 'image' of their"):
            ContextParallel(ContextParallelConfig()).apply(ForeignModel(), context)


def test_what_has_no_positions_is_not_cut():
    shade = Entry(dims=("sample", "channel", "position"))
    entries = {"tokens": KNOWN["tokens"], "image": Entry(dims=("sample", "height")), "shade": shade}
    model = Recorded()
    part = SequencePart(1, 2, dims=position_dims(entries))
    model.register_forward_pre_hook(part.take, with_kwargs=True)
    image, shades = torch.arange(16).reshape(2, 8), torch.arange(48).reshape(2, 3, 8)

    taken = model(torch.zeros(2, 8, dtype=torch.int64), image=image, shade=shades)

    assert taken["image"] is image
    assert torch.equal(taken["shade"], shades[:, :, place_of(1, 2, 8)])


def place_of(rank: int, ranks: int, seq_len: int) -> torch.Tensor:
    chunks = torch.arange(seq_len).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


class Recorded(nn.Module):
    def __init__(self, embed=True):
        super().__init__()
        self.embed = nn.Identity() if embed else None

    def forward(self, tokens, targets=None, loss=None, **inputs):
        return {"tokens": tokens, "targets": targets, "loss": loss, **inputs}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_take_chunks_from_both_ends_and_together_all_of_it(ranks):
    tokens = torch.arange(24).reshape(2, 12)
    seen, work = [], []
    for rank in range(ranks):
        model = Recorded()
        model.register_forward_pre_hook(SequencePart(rank, ranks).take, with_kwargs=True)
        taken = model(tokens, tokens + 100, loss="a loss")

        place = place_of(rank, ranks, 12)
        assert torch.equal(taken["tokens"], tokens[:, place])
        assert torch.equal(taken["targets"], tokens[:, place] + 100)
        assert torch.equal(taken["positions"], place.expand(2, -1))
        assert taken["loss"] == "a loss"
        seen.append(place)
        work.append(int(taken["mask"].sum()))

    assert torch.equal(torch.cat(seen).sort().values, torch.arange(12))
    assert len(set(work)) == 1, "each rank has as many pairs of query and key"


def test_positions_and_documents_of_the_batch_are_cut_and_the_mask_knows_the_whole():
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0]])
    place = place_of(1, 2, 8)
    model = Recorded()
    model.register_forward_pre_hook(SequencePart(1, 2).take, with_kwargs=True)

    taken = model(torch.zeros(2, 8, dtype=torch.int64), document=document, positions=positions)

    assert torch.equal(taken["positions"], positions[:, place])
    assert torch.equal(taken["document"], document[:, place])
    whole = (document[:, :, None] == document[:, None, :]) & torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(taken["mask"], whole[:, None, place])


def test_a_later_pipeline_stage_is_given_its_part_of_the_hidden_states_and_cuts_the_rest():
    model = Recorded(embed=False)
    model.register_forward_pre_hook(SequencePart(0, 2).take, with_kwargs=True)
    hidden, targets = torch.randn(2, 4, 3), torch.arange(16).reshape(2, 8)

    taken = model(hidden, targets=targets)

    assert taken["tokens"] is hidden
    assert torch.equal(taken["targets"], targets[:, place_of(0, 2, 8)])
    assert taken["mask"].shape == (1, 1, 4, 8)


def test_a_sequence_of_another_length_is_refused():
    model = Recorded()
    model.register_forward_pre_hook(SequencePart(0, 2).take, with_kwargs=True)

    with pytest.raises(ConfigError, match="a sequence of 10 tokens cannot be cut into 4 chunks"):
        model(torch.zeros(1, 10, dtype=torch.int64))


@pytest.mark.parametrize(
    ("cp", "seq_len", "sentences"),
    [
        (2, 32, []),
        (1, 32, ["there is nothing to share sequences with, as parallel.cp = 1; raise it or take the pass out"]),
        (
            4,
            30,
            [
                (
                    "it cuts each sequence into 2 × parallel.cp = 8 chunks of one length, and train.seq_len = 30 does "
                    "not divide into them; 24 or 32 does"
                )
            ],
        ),
    ],
)
def test_validation_says_which_lengths_can_be_shared_out(cp, seq_len, sentences):
    job = small_job()
    job = attrs.evolve(job, train=attrs.evolve(job.train, seq_len=seq_len), parallel=attrs.evolve(job.parallel, cp=cp))

    assert [sentence for _, sentence in ContextParallelConfig().check(job)] == sentences


LENGTHS = [4 * TILE, 4 * TILE + 24]


def documents(kind: str, seq_len: int) -> torch.Tensor | None:
    if kind == "one":
        return None
    lengths = torch.tensor([[seq_len // 2 + 5, 200, 10_000], [3, seq_len - 10, 10_000]])
    return torch.stack([torch.arange(3).repeat_interleave(row)[:seq_len] for row in lengths])


@pytest.mark.parametrize("kind", ["one", "packed"])
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("window", [0, 1, 100, 300])
def test_the_tiles_of_the_block_mask_cover_the_dense_mask_and_no_more(kind, seq_len, rank, window):
    document, place = documents(kind, seq_len), place_of(rank, 2, seq_len)
    dense = dense_mask(place, seq_len, document, window)[:, 0]

    mask = block_mask(place, seq_len, document, window)

    assert mask.shape[-2:] == (len(place), seq_len)
    for b in range(dense.shape[0]):
        covered = torch.zeros_like(dense[b])
        for counts, indices, full in (
            (mask.kv_num_blocks, mask.kv_indices, False),
            (mask.full_kv_num_blocks, mask.full_kv_indices, True),
        ):
            for row, count in enumerate(counts[b, 0].tolist()):
                for column in indices[b, 0, row, :count].tolist():
                    tile = (slice(row * TILE, (row + 1) * TILE), slice(column * TILE, (column + 1) * TILE))
                    covered[tile] = True
                    assert not full or dense[b][tile].all()
        assert not (dense[b] & ~covered).any()
        queries = torch.arange(len(place))[:, None].expand_as(dense[b])
        keys = torch.arange(seq_len)[None].expand_as(dense[b])
        assert torch.equal(mask.mask_mod(torch.tensor(b), torch.tensor(0), queries, keys), dense[b])
        transposed = [(mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices)]
        for (counts, indices), (of, where) in zip(
            transposed,
            [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)],
            strict=True,
        ):
            forward = {(r, c) for r, n in enumerate(of[b, 0].tolist()) for c in where[b, 0, r, :n].tolist()}
            backward = {(r, c) for c, n in enumerate(counts[b, 0].tolist()) for r in indices[b, 0, c, :n].tolist()}
            assert forward == backward


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["one", "packed"])
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_the_block_mask_attends_as_the_dense_mask_on_a_gpu(kind, seq_len):
    document, place = documents(kind, seq_len), place_of(1, 2, seq_len).cuda()
    document = None if document is None else document.cuda()
    q = torch.randn(2, 4, len(place), 32, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, 2, seq_len, 32, device="cuda", requires_grad=True) for _ in range(2))
    mask = block_mask(place, seq_len, document)

    flexible = torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(place, seq_len, document), enable_gqa=True)

    torch.testing.assert_close(flexible, plain, rtol=0, atol=5e-3)
    weights = torch.randn_like(plain)
    for found, expected in zip(
        torch.autograd.grad(flexible, (q, k, v), weights), torch.autograd.grad(plain, (q, k, v), weights), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
