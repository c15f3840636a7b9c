"""A decoder like GPT-J and GPT-NeoX: attention and MLP side by side, one norm before both, biases everywhere.

What no model of Forge's own has: LayerNorm, a norm after the embedding (BLOOM), learned positions, one matrix for
queries, keys and values, squared ReLU (Primer), a bias at the head; and no name inside of ``embed`` and ``blocks`` is
one of theirs.

Shapes: B = batch, S = sequence, W = width of the stream, V = vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.observation import Site

STREAM = ("sample", "position", "width")


class Jay(nn.Module):
    def __init__(self, config, /, *, vocab_size, **_):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.max_seq_len = config.longest
        self.embed = Entrance(vocab_size, config.longest, config.width)
        self.blocks = nn.ModuleDict({str(i): TwinBlock(config.width, config.looks) for i in range(config.depth)})
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocab_size)
        if config.tied:
            self.head.weight = self.embed.words.weight

    def forward(self, tokens, targets=None, loss=None, *, positions=None, document=None, mask=None, **_):
        if mask is None and document is not None:
            mask = _same_document_and_not_later(document)
        stream = tokens if self.embed is None else self.embed(tokens, positions)
        for block in self.blocks.values():
            stream = block(stream, mask)
        if self.norm is not None:
            stream = self.norm(stream)
        if self.head is None:
            return stream
        return self.head(stream) if loss is None else loss(stream, self.head, targets)

    def init_weights(self, rng):
        for name, parameter in self.named_parameters():
            mean = 1.0 if name.endswith("level.weight") or name == "norm.weight" else 0.0
            rng.fill(name, parameter, lambda full, generator, mean=mean: full.normal_(mean, 0.06, generator=generator))

    def parallel_plan(self):
        return {
            "embed.words": "embedding",
            "embed.places": "embedding",
            "embed.level": "residual",
            "blocks.*.level": "sequence",
            "blocks.*.mixer.query_key_value": "column",
            "blocks.*.mixer.mix": "row",
            "blocks.*.channel.up": "column",
            "blocks.*.channel.down": "row",
            "norm": "sequence",
            "head": "vocab",
        }

    def context_plan(self):
        return [f"blocks.{key}.mixer.look" for key in self.blocks]

    def recompute_plan(self):
        return {"aten.addmm": "keep", "aten._scaled_dot_product_flash_attention_for_cpu": "keep"}

    def sites(self):
        found = {} if self.embed is None else {"embed": Site(module="embed", dims=STREAM)}
        for key in self.blocks:
            block = f"blocks.{key}"
            found[f"{block}.resid_pre"] = Site(module=block, where="input", dims=STREAM)
            found[f"{block}.z"] = Site(module=f"{block}.mixer.look", dims=("sample", "head", "position", "head_width"))
            found[f"{block}.attn_out"] = Site(module=f"{block}.mixer", dims=STREAM)
            found[f"{block}.mlp_post"] = Site(
                module=f"{block}.channel.down", where="input", dims=("sample", "position", "neuron")
            )
            found[f"{block}.mlp_out"] = Site(module=f"{block}.channel", dims=STREAM)
            found[f"{block}.resid_post"] = Site(module=block, dims=STREAM)
        if self.head is not None:
            found["final_norm"] = Site(module="norm", dims=STREAM)
            found["logits"] = Site(module="head", dims=("sample", "position", "vocabulary"))
        return found

    def parameter_roles(self):
        return {name: _role(name) for name, _ in self.named_parameters()}

    def flops_per_token(self, seq_len):
        matrices = sum(one.numel() for name, one in self.named_parameters() if _role(name) == "matrix")
        head = self.config.width * self.vocab_size
        return 6 * (matrices + head) + 12 * self.config.depth * self.config.width * seq_len


class Entrance(nn.Module):
    """Words and places, added and normed."""

    def __init__(self, vocab_size, longest, width):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(longest, width)
        self.level = nn.LayerNorm(width)

    def forward(self, tokens, positions):
        """Two ``(B, S)`` to ``(B, S, W)``."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.level(self.words(tokens) + self.places(positions))


class TwinBlock(nn.Module):
    """``x + attention(norm(x)) + mlp(norm(x))``."""

    def __init__(self, width, looks):
        super().__init__()
        self.level = nn.LayerNorm(width)
        self.mixer = Mixer(width, looks)
        self.channel = Channel(width)

    def forward(self, stream, mask):
        level = self.level(stream)
        return stream + self.mixer(level, mask) + self.channel(level)


class Mixer(nn.Module):
    """Causal attention. Rows of the one matrix are ordered by head, and in a head by query, key, value."""

    def __init__(self, width, looks):
        super().__init__()
        self.size = width // looks
        self.query_key_value = nn.Linear(width, 3 * width)
        self.look = Look()
        self.mix = nn.Linear(width, width)

    def forward(self, level, mask):
        by_head = self.query_key_value(level).unflatten(-1, (-1, 3 * self.size)).transpose(1, 2)
        return self.mix(self.look(*by_head.chunk(3, dim=-1), mask).transpose(1, 2).flatten(2))


class Look(nn.Module):
    def forward(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class Channel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, level):
        return self.down(self.up(level).relu().square())


def _same_document_and_not_later(document):
    """``(B, S)`` to ``(B, 1, S, S)`` bool."""
    place = torch.arange(document.shape[1], device=document.device)
    return ((place[:, None] >= place) & (document[:, :, None] == document[:, None, :])).unsqueeze(1)


def _role(name):
    if name.endswith("bias"):
        return "bias"
    if name.startswith(("embed.words", "embed.places")):
        return "embedding"
    if "level" in name or name == "norm.weight":
        return "norm"
    return "head" if name == "head.weight" else "matrix"
