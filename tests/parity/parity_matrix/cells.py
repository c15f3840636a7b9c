"""The cells of the matrix, as data: what is trained, and in which layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

EXACT = 1e-5
"""Relative. In fp32 only the order of sums differs: 4e-7 in most cells, 3e-6 with auxiliary losses under tp."""
BF16 = 2e-2
"""bf16 rounds to 2⁻⁹ relative, and products here are averages over 32 features and more. Measured against fp32: 4e-3
for the gradient norm, 4e-4 for the loss."""
FP16 = 3e-3
"""fp16 rounds to 2⁻¹² relative, an eighth of bf16."""
FP8 = 6e-2
"""float8 rounds to 2⁻⁴ (e4m3) or 2⁻³ (e5m2) relative, 16 to 32 times as coarse as bf16; errors of a sum of 32
independent terms are about 1/√32 of that. Measured against bf16: 1e-2 for the gradient norm, 1e-3 for the loss."""

_IN_FP16 = ["train.precision=fp16"]
_DEEPSEEK = 'router={name="sigmoid_topk", bias_rate=0.01, balance=0.01, z_loss=0.001}'
_OLMOE = 'router={name="softmax_topk", order="softmax_topk", balance=0.01, bias_rate=0.01}'

_SHAPE = [  # job.toml's, which goes with the model's name when another one is named
    *("model.dim=32", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=4", "model.max_seq_len=64"),
    *("model.qk_norm=true", "model.init_std=0.05"),
]

_MUON = (  # in fp32: what bf16 rounds would be told from one layout to another
    'optimizer={name="grouped", groups=[{roles=["matrix", "expert"], optimizer={name="muon", lr=1e-2, dtype="fp32"}}, '
    '{optimizer={name="adamw", lr=3e-3}}]}'
)
_SCHEDULE_FREE = "optimizer={name='schedule_free_adamw', lr=3e-3}"
_COMPLETE_P = ["parametrization={name='complete_p', base={dim=16, n_layers=2}}", "optimizer.weight_decay=0.1"]
_FACTORED = "optimizer={name='adafactor', lr=3e-3, beta1=0.5}"
_PACKED = ["data.path=short", "data.document_mask=true"]
_ONE_BY_ONE = ["train.batch_size=1", "train.grad_accumulation=4"]
"""A sequence in a microbatch, for what looks at all tokens of one; layouts then change nothing about it."""

_FROZEN_THEN_THAWED = (  # whole blocks, and with them whole units of FSDP and a stage of a pipeline
    'phases=[{at=1, train=["blocks.2.*", "blocks.3.*", "head.*"]}, {at=4, lr_scale={"blocks.0.*"=0.5, "embed.*"=2.0}}]'
)

_GEMMA = [  # windows, capped logits, norms on both sides and of all heads; a layer without a window, two not rotated
    *("model.norm=zero_centered_rmsnorm", "model.norm_placement=both", "model.embed_multiplier=5.0"),
    "model.qk_norm_over=all",
    *("model.attention_softcap=2.0", "model.output_softcap=3.0", "model.window=8", "model.rope_factor=2.0"),
    "model.layers=[{at=1, window=0, rope_theta=500.0, rope_factor=1.0}, {at='2:', rotary_fraction=0.0}]",
    'model.feed_forward={name="mlp", hidden_dim=48, activation="gelu_tanh", gated=true}',
]
_GPT = [  # biases, learned positions, attention and feed-forward layer side by side; another layer at the end
    *("model.norm=layernorm", "model.attention_bias=all", "model.learned_positions=true", "model.rotary_fraction=0.5"),
    "model.parallel_residual=true",
    'model.feed_forward={name="mlp", hidden_dim=48, activation="relu2", bias=true}',
    'model.layers=[{at=-1, feed_forward={name="mlp", hidden_dim=32, bias=true}}]',
]
_LORA = ["parallel.passes.lora={rank=4, alpha=16.0, exclude=['blocks.1.feed_forward.*']}"]
_GPT_DROPPING = [*_GPT, "model.residual_dropout=0.2", "model.embedding_dropout=0.1"]
_GPT_OSS = [  # every second with a window, sinks in all but one, biases, a clamp; heads that tp2×fsdp2 leaves uneven
    *("model.n_heads=6", "model.n_kv_heads=2", "model.head_dim=8", "model.init_std=0.06"),
    *("model.qk_norm=false", "model.attention_bias=all", "model.window=8", "model.attention_sinks=true"),
    "model.layers=[{at='1::2', window=0}, {at=2, attention_sinks=false, rope_stretched=false}]",
    "model.yarn={factor=4.0, original_max_seq_len=8}",
    'model.feed_forward={name="mlp", hidden_dim=48, activation="clamped_swiglu", activation_limit=0.1, bias=true}',
]
_LONG_ROPE = (
    "model.long_rope={short_factor=[1.0, 1.5], long_factor=[3.0, 9.0], original_max_seq_len=%d, attention_factor=1.2}"
)
_CHAT = (  # answers alone are learned from, documents packed and apart, chats that are too long cut
    'data={name="chat", path="chats.jsonl", too_long="cut", validation=0.1, '
    'tokenizer={name="bytes", chat_template="chat.jinja"}}'
)
_MIXTURE = [  # with other weights from the fourth step on
    (
        'data={name="mixture", sources=[{name="long", weight=0.7, source={name="text_files", path="long", '
        'validation=0.1}}, {name="short", weight=0.3, loss_weight=2.5, source={name="text_files", path="short", '
        "validation=0.2}}]}"
    ),
    "phases=[{at=4, data={weights={short=2.0}}}]",
]
_MOE_BIASED = (  # with a limit that is reached; the bias of "down" is whole where tp cuts the rest
    'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, activation="clamped_swiglu", activation_limit=0.1, '
    'bias=true, router={name="softmax_topk", gate_bias=true, balance=0.01}}'
)
_MOE = f'model.feed_forward={{name="moe", n_experts=4, hidden_dim=32, shared_experts=1, {_DEEPSEEK}}}'

_PICTURES = (
    '{name="image_text", path="pictures/data.json", format="llava", token_grid=[2, 2], validation=0.1, '
    'processor={name="square", size=16}, prompt_template="{prompt}{answer}"}'
)
_LOOKING = [
    "model.name=vision_language",
    *_SHAPE,
    "model.encoder={name='conv_vit', size=[16, 16], patch=8, dim=16, n_layers=2, n_heads=2}",
    f"data={_PICTURES}",
]
_MORE_TEXT = (  # some microbatches of some ranks have no picture
    f'data={{name="mixture", sources=[{{name="pictures", weight=0.4, source={_PICTURES}}}, '
    '{name="long", weight=0.6, source={name="text_files", path="long", validation=0.1}}]}'
)
_SMALL_PICTURES = _PICTURES.replace("[2, 2]", "[1, 1]").replace("size=16", "size=8")
_TWO_SIZES = [  # some microbatches of some ranks have one of them
    (
        f'data={{name="mixture", sources=[{{name="large", weight=0.5, source={_PICTURES}}}, '
        f'{{name="small", weight=0.5, source={_SMALL_PICTURES}}}]}}'
    ),
    *("model.encoded_sizes=[[8, 8], [16, 16]]", "model.encoder.any_size=true"),
]
_MODALITY_EXPERTS = (
    '{name="moe", n_experts=2, hidden_dim=32, '
    'router={name="expert_choice", experts_per_token=1, score_function="sigmoid", predictor=true}}'
)

_NOISY_EXPERTS = _MODALITY_EXPERTS.replace("predictor=true", "predictor=true, gumbel_noise=true")
_REPLAYED_EXPERTS = _MODALITY_EXPERTS.replace("expert_choice", "replayed_choice")

TRAININGS: Mapping[str, Sequence[str]] = {
    # What one process is trained with; each is a run that its cells are compared with.
    "plain": [],
    "tied": ["model.tie_embeddings=true", "model.qk_norm_over=all"],  # norms of all heads besides
    "even vocabulary": ["model.vocab_size=264"],  # the 257 bytes and separator are divided by no number of ranks here
    "layernorm": ["model.norm=layernorm", "model.norm_placement=output"],
    "windows": _GEMMA,
    "windows packed": [*_GEMMA, *_PACKED],
    "windows and sinks": _GPT_OSS,
    "windows and sinks packed": [*_GPT_OSS, *_PACKED],
    "biases": _GPT,
    "long rope": [_LONG_ROPE % 16],
    "long rope packed": [_LONG_ROPE % 12, *_PACKED],  # documents on both sides
    "lora": _LORA,
    "chat": [_CHAT],
    "lora bf16": [*_LORA, "train.precision=bf16"],
    "lora moe": ["parallel.passes.lora.rank=4", _MOE],
    "biases and dropout": _GPT_DROPPING,
    "attention dropout": [*_GPT_DROPPING, "model.attention_dropout=0.2", "model.attention_sinks=true"],
    "packed": _PACKED,
    "penalised": ['loss={name="label_smoothing", smoothing=0.2, loss={name="z_loss", coefficient=0.01}}'],
    "mixture": _MIXTURE,
    "mixture moe": [*_MIXTURE, _MOE],
    "phases": [_FROZEN_THEN_THAWED],
    "phases moe": [_FROZEN_THEN_THAWED, _MOE],
    "phases bf16": [_FROZEN_THEN_THAWED, "train.precision=bf16"],
    "auxiliary": ['model.feed_forward={name="sized_mlp"}'],
    "bf16": ["train.precision=bf16"],
    "wide bf16": [  # in blocks of 128, on each of two ranks
        *("train.precision=bf16", "optimizer.lr=0.0001", "model.dim=256", "model.n_heads=2", "model.n_kv_heads=2"),
        'model.feed_forward={name="mlp", hidden_dim=256}',
    ],
    "latent": [  # every second layer; the others have heads, and rotated features, of another size
        'model.mixer={name="latent", kv_rank=24, q_rank=16, plain_dim=6, rotary_dim=2, value_dim=6}',
        'model.layers=[{at="1::2", mixer="attention"}]',
    ],
    "moe": ["model.init_depth=layer", _MOE],
    "moe biased": [_MOE_BIASED],
    "moe packed": [
        _MOE,
        *_PACKED,
    ],
    # a sample of every fourth position is the same one in parts of a sequence
    "ahead": ["model.multi_token={depths=2, acceptance_every=4}"],
    "ahead packed": ["model.multi_token={depths=2, acceptance_every=4, normalizer='paper'}", *_PACKED],
    "ahead moe packed": [
        "model.multi_token={depths=2, acceptance_every=4}",
        _MOE,
        *_PACKED,
    ],
    "whole": ['model.feed_forward={name="whole_mlp", hidden_dim=48}'],
    "moe whole positions": [
        "model.name=without_positions_apart",
        *_SHAPE,
        (
            'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, shared_experts=1, shared_gate=true, '
            f"{_DEEPSEEK}}}"
        ),
    ],
    "moe hash": [
        (
            'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, scale_gradients=true, '
            'router={name="hash", top_k=2, weights="gate"}}'
        )
    ],
    # float8 and bf16 choose the same experts only if nothing that is rounded decides
    "moe hash bf16": [
        'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, router="hash"}',
        "train.precision=bf16",
    ],
    "moe expert choice": [
        (
            'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, shared_experts=1, '
            'router={name="expert_choice", predictor=true}}'
        ),
        *_ONE_BY_ONE,
    ],
    "moe capacity": [
        (
            'model.feed_forward={name="moe", n_experts=4, hidden_dim=32, capacity_factor=0.75, renormalize=true, '
            f"{_DEEPSEEK}}}"
        ),
        *_ONE_BY_ONE,
    ],
    "moe sinkhorn": ['model.feed_forward={name="moe", n_experts=4, hidden_dim=32, router="sinkhorn"}', *_ONE_BY_ONE],
    "moe noisy": ['model.feed_forward={name="moe", n_experts=4, hidden_dim=32, router="noisy_topk"}', *_ONE_BY_ONE],
    "joint": _LOOKING,
    "joint cut": [*_LOOKING, "model.cut_encoder=true"],  # over tp, where the encoder of "joint" is whole
    "joint packed": [*_LOOKING, "data.packing=true"],
    "joint mrope": [*_LOOKING, 'model.fusion={name="joint_decoder", mrope_sections=[0, 1, 1], bidirectional=true}'],
    "joint padded": [  # tiles of which the picture is a part
        *_LOOKING,
        "model.encoder.any_size=true",
        'data.processor={name="naflex", size=24, patch=8, max_patches=4}',
        "data.token_grid=[3, 3]",
    ],
    "joint among text": [*_LOOKING, _MORE_TEXT],
    "joint of two sizes": [*_LOOKING, *_TWO_SIZES],
    "crossed of two sizes": [*_LOOKING, *_TWO_SIZES, 'model.fusion={name="cross_attention", layers=[0, 2, 3]}'],
    "joint frozen then thawed": [
        *_LOOKING,
        'phases=[{at=1, train=["vision.connector.*"]}, {at=4, train=["vision.connector.*", "blocks.*"]}, {at=8}]',
    ],
    "crossed": [
        *_LOOKING,
        'model.fusion={name="cross_attention", layers=[0, 2, 3], n_heads=4, n_kv_heads=2}',
        "data.one_token_an_image=true",
    ],
    "crossed packed": [
        *_LOOKING,
        'model.fusion={name="cross_attention", layers=[1], attend="all_previous", place="replace"}',
        *("data.one_token_an_image=true", "data.packing=true"),
    ],
    "mixture of transformers": [*_LOOKING, "model.fusion.name=mixture_of_transformers"],
    "moma": [
        *_LOOKING,
        f"model.fusion={{name='moma', image={_MODALITY_EXPERTS}}}",
        f"model.feed_forward={_MODALITY_EXPERTS}",
    ],
    "moma noisy": [
        *_LOOKING,
        f"model.fusion={{name='moma', image={_NOISY_EXPERTS}}}",
        f"model.feed_forward={_NOISY_EXPERTS}",
    ],
    "moma replayed bf16": [
        *_LOOKING,
        f"model.fusion={{name='moma', image={_REPLAYED_EXPERTS}}}",
        f"model.feed_forward={_REPLAYED_EXPERTS}",
        "train.precision=bf16",
    ],
    "muon": [  # beside whole matrices of the shape, two that are taken for stacked ones
        _MUON.replace('dtype="fp32"', 'dtype="fp32", stacked=[{pattern="*.attention.q.weight", rows=[20, 12]}]')
    ],
    "muon moe": [
        _MOE,
        _MUON,
    ],
    "factored": [_FACTORED],
    "factored moe": [
        _MOE,
        _FACTORED,
    ],
    "eight bit": ["optimizer={name='adamw_8bit', lr=6e-3, min_elements=0}"],
    "split": ["train.precision=bf16_pure", "optimizer={name='adamw', lr=3e-3, rounding='split'}"],
    "lion": ["optimizer={name='lion', lr=3e-4}"],
    "lion moe": [
        _MOE,
        "optimizer={name='lion', lr=3e-4}",
    ],
    "complete p": _COMPLETE_P,
    "complete p moe": [
        _MOE,
        *_COMPLETE_P,
    ],
    "schedule free": [_SCHEDULE_FREE],
    "schedule free moe": [
        _MOE,
        _SCHEDULE_FREE,
    ],
    # two of four layers; more experts than a microbatch fills; counts of the step before
    "moe every second": [
        (
            'model.feed_forward={name="moe", n_experts=8, hidden_dim=16, every=2, shared_experts=2, shared_gate=true, '
            f"{_OLMOE}}}"
        )
    ],
}
IN_BF16 = ("joint", "crossed", "mixture of transformers", "moma", "joint packed", "joint frozen then thawed")
"""Trainings of images and text that are also done in bf16."""
TRAININGS = {**TRAININGS, **{f"{name} bf16": [*TRAININGS[name], "train.precision=bf16"] for name in IN_BF16}}


@attrs.frozen
class Cell:
    """A layout, and the training that it must not change."""

    ranks: int
    layout: Sequence[str]
    training: str = "plain"
    """Which of ``TRAININGS``."""
    tolerance: float = EXACT
    """Largest relative difference of gradient norms."""
    auxiliary_tolerance: float | None = None
    """The same of auxiliary losses, where one follows its parameters alone and no mean evens anything out."""

    @property
    def loss_tolerance(self) -> float:
        """Largest relative difference of losses: means over tokens, in which what is rounded off evens out."""
        return max(EXACT, self.tolerance / 10)


# A step has four sequences: microbatches × sequences in one × ranks that see different ones.
HALF, QUARTER = "train.batch_size=2", "train.batch_size=1"
TWO_MICROBATCHES = [HALF, "train.grad_accumulation=2"]
FOUR_MICROBATCHES = [QUARTER, "train.grad_accumulation=4"]
TWO_SMALL_MICROBATCHES = [QUARTER, "train.grad_accumulation=2"]

FSDP = "parallel.passes.fsdp"
SHARDED_SUMS = f"{FSDP}.accumulate=sharded"
AC = "parallel.passes.activation_checkpointing"
COMPILE = "parallel.passes.compile"
FP8_PASS = "parallel.passes.fp8"
EMULATED = [f"{FP8_PASS}.emulate=true", f"{FP8_PASS}.min_dim=16"]
BLOCKWISE = [f"{FP8_PASS}.emulate=true", f"{FP8_PASS}.min_dim=128", f"{FP8_PASS}.recipe=blockwise"]
EXPERTS_ONLY = [*EMULATED, f"{FP8_PASS}.experts=true", f'{FP8_PASS}.exclude=["*.attention.*"]']
CHUNKED = ["loss.name=chunked_cross_entropy", "loss.chunk_size=48"]
PENALISED_IN_CHUNKS = ['loss.loss.loss={name="chunked_cross_entropy", chunk_size=48}']
TP2, CP2, EP2, COPIES = "parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "parallel.dp_replicate=2"
RING = "parallel.passes.context_parallel.method=ring"
EXPERTS = "parallel.passes.expert_parallel"
OVERLAP = f"{EXPERTS}.overlap=true"
TWO_NODES = f'{EXPERTS}.dispatcher={{name="hierarchical", ranks_per_node=2}}'


def auto(memory_gib: float) -> list[str]:
    return [f"{AC}.mode=auto", f"{AC}.memory_gib={memory_gib}"]


def pp2(schedule: str, *microbatches: str) -> list[str]:
    return ["parallel.pp=2", f"parallel.passes.pipeline.schedule={schedule}", *(microbatches or FOUR_MICROBATCHES)]


def custom(*actions: str) -> list[str]:
    return [*pp2("custom", *TWO_MICROBATCHES), f"parallel.passes.pipeline.actions={[*actions]}"]


_REVERSED = custom("1F1 1F0 1B0 1B1", "0F1 0F0 0B0 0B1")
"""The first stage on the last rank, the second microbatch first, and the latest one back first."""
_A_V = custom("0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0W0 0B1 3W1", "1F0 2F0 1F1 2F1 2I0 1I0 2W0 2B1 1W0 1B1")
_UNEVEN = custom("0F0 0F1 2F0 2I0 2W0 2F1 2B1 0B0 0B1", "1F0 1F1 1I0 1B1 1W0")
"""Two stages on one rank, and one on the other."""
_FEW = ("fsdp2", "tp2-fsdp2", "pp2", "cp2", "moe-ep2")


def optimizer_cells(training: str, tolerance: float = EXACT) -> dict[str, Cell]:
    """An optimizer in every kind of layout; its training with experts is called the same and ``moe``."""
    layouts = {
        "accumulation4": Cell(1, FOUR_MICROBATCHES),
        "fsdp2": Cell(2, [HALF]),
        "fsdp4": Cell(4, [QUARTER]),
        "hsdp2x2": Cell(4, [QUARTER, COPIES]),
        "tp2": Cell(2, [TP2]),
        "tp2-fsdp2": Cell(4, [TP2, HALF]),
        "pp2": Cell(2, pp2("1F1B")),
        "pp2-fsdp2": Cell(4, pp2("1F1B", *TWO_SMALL_MICROBATCHES)),
        "cp2": Cell(2, [CP2]),
        "moe-ep2": Cell(2, [HALF, EP2], f"{training} moe"),
        "moe-ep2-fsdp2": Cell(4, [QUARTER, EP2], f"{training} moe"),
    }
    return {
        f"{training.replace(' ', '-')}-{name}": cell
        if "moe" in name
        else attrs.evolve(cell, training=training, tolerance=tolerance)
        for name, cell in layouts.items()
    }


def decoder_cells(training: str) -> dict[str, Cell]:
    """Options of a decoder, in every kind of layout."""
    layouts = {
        "accumulation4": Cell(1, FOUR_MICROBATCHES),
        "chunked": Cell(1, CHUNKED),
        "ac-full": Cell(1, [f"{AC}=true"]),
        "ac-selective-compiled": Cell(1, [f"{AC}.mode=selective", f"{COMPILE}=true"]),
        "fsdp2": Cell(2, [HALF]),
        "hsdp2x2": Cell(4, [QUARTER, COPIES]),
        "tp2-chunked": Cell(2, [TP2, *CHUNKED]),
        "tp2-whole-positions": Cell(2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"]),
        "tp2-fsdp2": Cell(4, [TP2, HALF]),
        "pp2": Cell(2, pp2("ZBVZeroBubble")),
        "pp2-tp2": Cell(4, [*pp2("1F1B"), TP2]),
        "cp2": Cell(2, [CP2]),
        "cp2-tp2": Cell(4, [CP2, TP2]),
    }
    return {
        f"{training.replace(' ', '-')}-{name}": attrs.evolve(cell, training=training) for name, cell in layouts.items()
    }


def looking_cells(training: str, *, cp: bool = True) -> dict[str, Cell]:
    """A model of images and text, in every kind of layout."""
    layouts = {
        "accumulation4": Cell(1, FOUR_MICROBATCHES),
        "ac-selective-compiled": Cell(1, [f"{AC}.mode=selective", f"{COMPILE}=true"]),
        "fsdp2": Cell(2, [HALF]),
        "hsdp2x2": Cell(4, [QUARTER, COPIES]),
        "tp2": Cell(2, [TP2]),
        "tp2-whole-positions": Cell(2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"]),
        "tp2-fsdp2-ac-full": Cell(4, [TP2, HALF, f"{AC}=true"]),
        "pp2": Cell(2, pp2("1F1B")),
        "pp2-zero-bubble-v-fsdp2": Cell(4, pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES)),
        "pp4": Cell(4, ["parallel.pp=4", *FOUR_MICROBATCHES]),
        "pp2-interleaved-tp2": Cell(4, [*pp2("Interleaved1F1B"), TP2]),
    }
    if cp:
        layouts["cp2"] = Cell(2, [CP2])
    return {
        f"{training.replace(' ', '-')}-{name}": attrs.evolve(cell, training=training) for name, cell in layouts.items()
    }


def bf16_cells(training: str) -> dict[str, Cell]:
    """The same in bf16, against one process in bf16. Experts that choose tokens are neither cut by ``tp`` nor
    compiled, but in ``replayed_cells``."""
    cells = looking_cells(f"{training} bf16", cp=training != "moma")
    left_out = {"moma": ["tp2", "compiled"], "joint packed": ["compiled"], "joint frozen then thawed": ["compiled"]}
    kept = {name: cell for name, cell in cells.items() if not any(one in name for one in left_out.get(training, []))}
    return {name: attrs.evolve(cell, tolerance=BF16) for name, cell in kept.items()}


def replayed_cells() -> dict[str, Cell]:
    """Experts that choose tokens, in bf16, where ``tp`` or a compiler rounds otherwise before the choice.

    In step 1 of ``moma bf16``, 4 of 512 choices under tp are not those of one process, of which 11 are not those of
    fp32. The first operation that gives something else is ``blocks.0.attention.o``, a sum over ranks, and compiled the
    encoder. All else is compared by giving experts the tokens that they had in one process.
    """
    replays = ["model.feed_forward.router.replays=true", "model.fusion.image.router.replays=true"]
    return {
        name: attrs.evolve(cell, layout=[*cell.layout, *replays], tolerance=BF16)
        for name, cell in looking_cells("moma replayed bf16", cp=False).items()
        if "tp2" in name or "compiled" in name
    }


CELLS: Mapping[str, Cell] = {
    "microbatches2": Cell(1, TWO_MICROBATCHES),
    "accumulation4": Cell(1, FOUR_MICROBATCHES),
    "global-batch": Cell(1, [QUARTER, "train.global_batch_size=4"]),
    "packed-accumulation4": Cell(1, FOUR_MICROBATCHES, "packed"),
    "chunked": Cell(1, CHUNKED),
    "penalised-chunked": Cell(1, PENALISED_IN_CHUNKS, "penalised"),
    "mixture-accumulation4": Cell(1, FOUR_MICROBATCHES, "mixture"),
    "fsdp1": Cell(1, [f"{FSDP}=true"]),
    "ac-none": Cell(1, [f"{AC}.mode=none"]),
    "ac-full": Cell(1, [f"{AC}=true"]),
    "ac-every-second": Cell(1, [f"{AC}.every=2"]),
    "ac-selective": Cell(1, [f"{AC}.mode=selective"]),
    "ac-auto": Cell(1, auto(0.006)),  # for two of four blocks
    "ac-budget": Cell(1, [f"{AC}.mode=budget", f"{AC}.budget=0.5", f"{COMPILE}=true"]),
    "compiled": Cell(1, [f"{COMPILE}=true"]),
    "bf16": Cell(1, TRAININGS["bf16"], tolerance=BF16),
    "bf16-ac-full": Cell(1, [f"{AC}=true"], "bf16"),
    # against one process in fp32, as the loss scale must not be seen in anything
    "fp16": Cell(1, _IN_FP16, tolerance=FP16),
    "fp16-auxiliary": Cell(1, [*_IN_FP16, *TWO_MICROBATCHES], "auxiliary", FP16, FP16),
    "fp16-compiled-penalised-chunked": Cell(
        1, [*_IN_FP16, f"{COMPILE}=true", *PENALISED_IN_CHUNKS], "penalised", FP16, FP16
    ),
    "fsdp2-fp16-sums-shards": Cell(2, [*_IN_FP16, *TWO_SMALL_MICROBATCHES, SHARDED_SUMS], tolerance=FP16),
    "tp2-fp16-auxiliary": Cell(2, [*_IN_FP16, TP2], "auxiliary", FP16, FP16),
    "cp2-fp16-ac-full": Cell(2, [*_IN_FP16, CP2, f"{AC}=true"], tolerance=FP16),
    "pp2-zero-bubble-v-fp16-biases": Cell(2, [*_IN_FP16, *pp2("ZBVZeroBubble")], "biases", FP16),
    "moe-ep2-fp16-hash": Cell(2, [*_IN_FP16, HALF, EP2], "moe hash", FP16),
    "fsdp2-fp16-phases": Cell(2, [*_IN_FP16, HALF], "phases", FP16),
    "fp8-tensorwise": Cell(1, EMULATED, "bf16", FP8),
    "fp8-rowwise-ac-selective": Cell(1, [*EMULATED, f"{FP8_PASS}.recipe=rowwise", f"{AC}.mode=selective"], "bf16", FP8),
    "fp8-rowwise-exact-gradients": Cell(1, [*EMULATED, f"{FP8_PASS}.recipe=rowwise_with_gw_hp"], "bf16", FP8),
    "fp8-mxfp8-ac-selective": Cell(1, [*EMULATED, f"{FP8_PASS}.recipe=mxfp8", f"{AC}.mode=selective"], "bf16", FP8),
    "fp8-mxfp8-compiled": Cell(1, [*EMULATED, f"{FP8_PASS}.recipe=mxfp8", f"{COMPILE}=true"], "bf16", FP8),
    "fp8-blockwise-compiled": Cell(1, [*BLOCKWISE, f"{COMPILE}=true"], "wide bf16", FP8),
    "tp2-fsdp2-fp8-blockwise": Cell(4, [TP2, HALF, *BLOCKWISE], "wide bf16", FP8),
    # data parallelism
    "fsdp2": Cell(2, [HALF]),
    "fsdp2-microbatches2": Cell(2, TWO_SMALL_MICROBATCHES),
    "fsdp2-sums-shards": Cell(2, [*TWO_SMALL_MICROBATCHES, SHARDED_SUMS]),
    "fsdp2-sums-shards-keep-gathered": Cell(2, [*TWO_SMALL_MICROBATCHES, SHARDED_SUMS, f"{FSDP}.keep_gathered=true"]),
    "fsdp2-sums-shards-bf16": Cell(2, [*TWO_SMALL_MICROBATCHES, SHARDED_SUMS], "bf16", BF16),
    "copies2-sums-shards": Cell(2, [COPIES, *TWO_SMALL_MICROBATCHES, SHARDED_SUMS]),
    "cp2-copies2-sums-shards": Cell(4, [CP2, COPIES, *TWO_SMALL_MICROBATCHES, SHARDED_SUMS]),
    "fsdp2-never-reshard": Cell(2, [HALF, f"{FSDP}.reshard_after_forward=never"]),
    "fsdp2-keep-gathered-ac-full": Cell(2, [*TWO_SMALL_MICROBATCHES, f"{FSDP}.keep_gathered=true", f"{AC}=true"]),
    "fsdp2-tied": Cell(2, [HALF], "tied"),
    "fsdp2-packed": Cell(2, [HALF], "packed"),
    "fsdp2-auxiliary": Cell(2, [HALF], "auxiliary"),
    "fsdp2-penalised": Cell(2, [HALF], "penalised"),
    "fsdp2-compiled-ac-selective": Cell(2, [HALF, f"{COMPILE}=true", f"{AC}.mode=selective"]),
    "fsdp2-fp8-gathered-ac-full": Cell(2, [HALF, *EMULATED, f"{FP8_PASS}.all_gather=true", f"{AC}=true"], "bf16", FP8),
    "hsdp2x2-fp8-gathered": Cell(4, [QUARTER, COPIES, *EMULATED, f"{FP8_PASS}.all_gather=true"], "bf16", FP8),
    "copies2": Cell(2, [HALF, COPIES]),
    "fsdp4": Cell(4, [QUARTER]),
    "hsdp2x2": Cell(4, [QUARTER, COPIES]),
    "hsdp2x2-ac-every-second": Cell(4, [QUARTER, COPIES, f"{AC}.every=2"]),
    "fsdp2-mixture": Cell(2, [HALF], "mixture"),
    "fsdp4-mixture": Cell(4, [QUARTER], "mixture"),
    "hsdp2x2-mixture": Cell(4, [QUARTER, COPIES], "mixture"),
    "phases-accumulation4": Cell(1, FOUR_MICROBATCHES, "phases"),
    "fsdp2-phases": Cell(2, TWO_SMALL_MICROBATCHES, "phases"),
    "fsdp4-phases": Cell(4, [QUARTER], "phases"),
    "fsdp2-phases-bf16": Cell(2, [HALF], "phases bf16", BF16),
    "hsdp2x2-phases": Cell(4, [QUARTER, COPIES], "phases"),
    "tp2-phases": Cell(2, [TP2], "phases"),
    "tp2-fsdp2-phases": Cell(4, [TP2, HALF], "phases"),
    "pp2-phases": Cell(2, pp2("1F1B"), "phases"),
    "pp2-fsdp2-zero-bubble-v-phases": Cell(4, pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), "phases"),
    "cp2-phases": Cell(2, [CP2], "phases"),
    # tensor parallelism
    "tp2-mixture": Cell(2, [TP2], "mixture"),
    "tp2-fsdp2-mixture-chunked": Cell(4, [TP2, HALF, *CHUNKED], "mixture"),
    "tp2": Cell(2, [TP2]),
    "tp2-whole-positions": Cell(2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"]),
    "tp2-tied": Cell(2, [TP2], "tied"),
    "tp2-chunked": Cell(2, [TP2, *CHUNKED], "layernorm"),
    "tp2-packed": Cell(2, [TP2], "packed"),
    "tp2-auxiliary": Cell(2, [TP2], "auxiliary"),
    "tp2-penalised": Cell(2, [TP2], "penalised"),
    "tp2-penalised-chunked": Cell(2, [TP2, *PENALISED_IN_CHUNKS], "penalised"),
    "tp2-whole": Cell(2, [TP2], "whole"),
    "tp2-whole-whole-positions": Cell(2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"], "whole"),
    "moe-tp2-without-sequence": Cell(2, [TP2], "moe whole positions"),
    "tp2-fsdp1-microbatches2": Cell(2, [TP2, *TWO_MICROBATCHES, f"{FSDP}=true"]),
    "tp2-ac-selective": Cell(2, [TP2, f"{AC}.mode=selective"]),
    "tp2-ac-every-second-product-compiled": Cell(
        2, [TP2, f"{COMPILE}=true", f"{AC}={{mode='selective', products_every=2, keep=['*mm', '*atten*', '_c10d*']}}"]
    ),
    # enough for the rank with 128 of 257 words to recompute a block less, which it must not
    "tp2-ac-auto": Cell(2, [TP2, *auto(0.0030876)]),
    "tp2-compiled": Cell(2, [TP2, f"{COMPILE}=true"]),
    "tp2-compiled-ac-full": Cell(2, [TP2, f"{COMPILE}=true", f"{AC}=true"]),
    "tp2-bf16": Cell(2, [TP2], "bf16", BF16),
    "tp2-fp8": Cell(2, [TP2, *EMULATED], "bf16", FP8),
    "tp4": Cell(4, ["parallel.tp=4"]),
    "tp2-fsdp2": Cell(4, [TP2, HALF]),
    "tp2-fsdp2-even-vocabulary": Cell(4, [TP2, HALF], "even vocabulary"),
    "tp2-fsdp2-tied": Cell(4, [TP2, HALF], "tied"),
    "tp2-copies2": Cell(4, [TP2, HALF, COPIES]),
    # pipelines
    "pp2-gpipe": Cell(2, pp2("GPipe")),
    "pp2-1f1b": Cell(2, pp2("1F1B")),
    "pp2-interleaved": Cell(2, pp2("Interleaved1F1B")),
    "pp2-interleaved-zero-bubble": Cell(2, pp2("InterleavedZeroBubble")),
    "pp2-zero-bubble-v": Cell(2, pp2("ZBVZeroBubble")),
    "pp2-dualpipe-v": Cell(2, pp2("DualPipeV")),
    "pp2-custom-uneven": Cell(2, _UNEVEN),
    "pp2-custom-reversed-tied": Cell(2, _REVERSED, "tied"),
    "pp2-custom-v-penalised": Cell(2, _A_V, "penalised"),
    "pp2-custom-v-compiled": Cell(2, [*_A_V, f"{COMPILE}=true"]),
    "pp2-custom-uneven-fsdp2": Cell(4, [*_UNEVEN, QUARTER]),
    "pp2-tied": Cell(2, pp2("1F1B"), "tied"),
    "pp2-zero-bubble-v-tied": Cell(2, pp2("ZBVZeroBubble"), "tied"),
    "pp2-interleaved-zero-bubble-fsdp2-tied": Cell(4, pp2("InterleavedZeroBubble", *TWO_SMALL_MICROBATCHES), "tied"),
    "pp2-tp2-tied": Cell(4, [*pp2("1F1B"), TP2], "tied"),
    "pp2-1f1b-packed": Cell(2, pp2("1F1B"), "packed"),
    "pp2-dualpipe-v-packed": Cell(2, pp2("DualPipeV"), "packed"),
    "pp2-interleaved-zero-bubble-packed": Cell(2, pp2("InterleavedZeroBubble"), "packed"),
    "pp2-1f1b-auxiliary": Cell(2, pp2("1F1B"), "auxiliary"),
    "pp2-zero-bubble-v-penalised": Cell(2, pp2("ZBVZeroBubble"), "penalised"),
    "pp2-zero-bubble-v-auxiliary": Cell(2, pp2("ZBVZeroBubble"), "auxiliary"),
    "pp2-zero-bubble-v-ac-full": Cell(2, [*pp2("ZBVZeroBubble"), f"{AC}=true"]),
    "pp2-zero-bubble-v-ac-selective": Cell(2, [*pp2("ZBVZeroBubble"), f"{AC}.mode=selective"]),
    "pp2-interleaved-zero-bubble-fsdp2-ac-selective": Cell(
        4, [*pp2("InterleavedZeroBubble", *TWO_SMALL_MICROBATCHES), f"{AC}.mode=selective"]
    ),
    "pp2-zero-bubble-v-chunked": Cell(2, [*pp2("ZBVZeroBubble"), *CHUNKED]),
    "pp2-interleaved-bf16": Cell(2, pp2("Interleaved1F1B"), "bf16", BF16),
    "pp4": Cell(4, ["parallel.pp=4", *FOUR_MICROBATCHES]),
    "pp2-fsdp2": Cell(4, pp2("1F1B", *TWO_SMALL_MICROBATCHES)),
    "pp2-copies2-zero-bubble-v": Cell(4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), COPIES]),
    "pp2-tp2": Cell(4, [*pp2("1F1B"), TP2]),
    "pp2-tp2-dualpipe-v-packed": Cell(4, [*pp2("DualPipeV"), TP2], "packed"),
    "pp2-fsdp2-tp2": Cell(8, [*pp2("Interleaved1F1B", *TWO_SMALL_MICROBATCHES), TP2]),
    "pp2-mixture": Cell(2, pp2("1F1B"), "mixture"),
    # backward compiled in two parts
    "pp2-zero-bubble-v-compiled": Cell(2, [*pp2("ZBVZeroBubble"), f"{COMPILE}=true"]),
    "pp2-interleaved-zero-bubble-compiled-tied": Cell(2, [*pp2("InterleavedZeroBubble"), f"{COMPILE}=true"], "tied"),
    "pp2-dualpipe-v-compiled-packed": Cell(2, [*pp2("DualPipeV"), f"{COMPILE}=true"], "packed"),
    "pp2-zero-bubble-v-compiled-auxiliary": Cell(2, [*pp2("ZBVZeroBubble"), f"{COMPILE}=true"], "auxiliary"),
    "pp2-zero-bubble-v-compiled-penalised": Cell(2, [*pp2("ZBVZeroBubble"), f"{COMPILE}=true"], "penalised"),
    "pp2-zero-bubble-v-compiled-ac-full": Cell(2, [*pp2("ZBVZeroBubble"), f"{COMPILE}=true", f"{AC}=true"]),
    "pp2-zero-bubble-v-compiled-ac-selective": Cell(
        2, [*pp2("ZBVZeroBubble"), f"{COMPILE}=true", f"{AC}.mode=selective"]
    ),
    "pp2-interleaved-zero-bubble-compiled-ac-budget": Cell(
        2, [*pp2("InterleavedZeroBubble"), f"{COMPILE}=true", f"{AC}={{mode='budget', budget=0.5}}"]
    ),
    "pp2-zero-bubble-v-fsdp2-compiled-mixture": Cell(
        4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), f"{COMPILE}=true"], "mixture"
    ),
    "pp2-zero-bubble-v-fsdp2-compiled-bf16": Cell(
        4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), f"{COMPILE}=true"], "bf16", BF16
    ),
    "pp2-tp2-zero-bubble-v-compiled": Cell(4, [*pp2("ZBVZeroBubble"), TP2, f"{COMPILE}=true"]),
    "pp2-tp2-dualpipe-v-compiled-ac-full-lora": Cell(
        4, [*pp2("DualPipeV"), TP2, f"{COMPILE}=true", f"{AC}=true"], "lora"
    ),
    "cp2-pp2-zero-bubble-v-compiled": Cell(4, [CP2, *pp2("ZBVZeroBubble"), f"{COMPILE}=true"]),
    "pp2-zero-bubble-v-fsdp2-mixture": Cell(4, pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), "mixture"),
    # context parallelism
    "cp2-mixture": Cell(2, [CP2], "mixture"),
    "cp2": Cell(2, [CP2]),
    "cp2-microbatches2-packed": Cell(2, [CP2, *TWO_MICROBATCHES], "packed"),
    "cp4-packed": Cell(4, ["parallel.cp=4"], "packed"),
    "cp2-ac-auto": Cell(2, [CP2, *auto(0.0027)]),
    "cp2-ring": Cell(2, [CP2, RING]),
    "cp2-ring-compiled": Cell(2, [CP2, RING, f"{COMPILE}=true"]),
    "cp2-ring-ac-selective": Cell(2, [CP2, RING, f"{AC}.mode=selective"]),
    # the second rank keeps more of what it attends to, so that the first would recompute a block less
    "cp2-ring-ac-auto": Cell(2, [CP2, RING, *auto(0.00277)]),
    "cp2-ring-bf16": Cell(2, [CP2, RING], "bf16", BF16),
    "cp4-ring": Cell(4, ["parallel.cp=4", RING]),
    "cp2-fsdp2": Cell(4, [CP2, HALF]),
    "cp2-ring-fsdp2": Cell(4, [CP2, RING, HALF]),
    "cp2-fsdp2-packed": Cell(4, [CP2, HALF], "packed"),
    "cp2-copies2": Cell(4, [CP2, HALF, COPIES]),
    "cp2-tp2": Cell(4, [CP2, TP2]),
    "cp2-ring-tp2": Cell(4, [CP2, RING, TP2]),
    "cp2-tp2-packed": Cell(4, [CP2, TP2], "packed"),
    "cp2-pp2-ac-full-packed": Cell(4, [CP2, *pp2("1F1B", *TWO_MICROBATCHES), f"{AC}=true"], "packed"),
    "cp2-ring-pp2-ac-full": Cell(4, [CP2, RING, *pp2("1F1B", *TWO_MICROBATCHES), f"{AC}=true"]),
    "cp2-ring-pp2-zero-bubble-v": Cell(4, [CP2, RING, *pp2("ZBVZeroBubble")]),
    "pp2-cp2-tp2": Cell(8, [CP2, *pp2("ZBVZeroBubble"), TP2]),
    # options of the decoder
    **decoder_cells("windows"),
    **decoder_cells("biases"),
    # biases that are added to one sum have one gradient, to which each microbatch adds
    "biases-tp2-compiled-accumulation4": Cell(2, [TP2, *FOUR_MICROBATCHES, f"{COMPILE}=true"], "biases"),
    "biases-tp2-whole-positions-compiled-accumulation4": Cell(
        2,
        [TP2, *FOUR_MICROBATCHES, f"{COMPILE}=true", "parallel.passes.tensor_parallel.sequence_parallel=false"],
        "biases",
    ),
    **decoder_cells("lora"),
    **decoder_cells("chat"),
    "lora-fsdp2-bf16": Cell(2, [HALF], "lora bf16", BF16),
    "lora-moe-ep2": Cell(2, [EP2, HALF], "lora moe"),
    **decoder_cells("biases and dropout"),
    "attention-dropout-accumulation4": Cell(1, FOUR_MICROBATCHES, "attention dropout"),
    "attention-dropout-ac-full": Cell(1, [f"{AC}=true"], "attention dropout"),
    "attention-dropout-compiled": Cell(1, [f"{COMPILE}=true"], "attention dropout"),
    "attention-dropout-fsdp2": Cell(2, [HALF], "attention dropout"),
    "attention-dropout-cp2": Cell(2, [CP2], "attention dropout"),
    "attention-dropout-tp2": Cell(2, [TP2], "attention dropout"),
    "attention-dropout-pp2-tp2": Cell(4, [*pp2("1F1B"), TP2], "attention dropout"),
    "attention-dropout-hsdp2x2": Cell(4, [QUARTER, COPIES], "attention dropout"),
    **decoder_cells("windows and sinks"),
    "windows-and-sinks-cp2-packed": Cell(2, [CP2], "windows and sinks packed"),
    "windows-and-sinks-pp2-fsdp2-packed": Cell(4, pp2("1F1B", *TWO_SMALL_MICROBATCHES), "windows and sinks packed"),
    "windows-cp2-packed": Cell(2, [CP2], "windows packed"),
    "windows-pp2-fsdp2-packed": Cell(4, pp2("1F1B", *TWO_SMALL_MICROBATCHES), "windows packed"),
    "long-rope-cp2": Cell(2, [CP2], "long rope"),
    "long-rope-cp2-ring": Cell(2, [CP2, RING], "long rope"),
    "long-rope-cp2-pp2": Cell(4, [CP2, *pp2("1F1B", *TWO_MICROBATCHES)], "long rope"),
    "long-rope-packed-accumulation4": Cell(1, FOUR_MICROBATCHES, "long rope packed"),
    "long-rope-packed-fsdp2-compiled": Cell(2, [HALF, f"{COMPILE}=true"], "long rope packed"),
    "long-rope-packed-tp2-fsdp2": Cell(4, [TP2, HALF], "long rope packed"),
    "long-rope-packed-cp2": Cell(2, [CP2], "long rope packed"),
    "long-rope-packed-pp2-cp2": Cell(4, [CP2, *pp2("ZBVZeroBubble")], "long rope packed"),
    # latent attention
    "latent-padded-cp2-ring": Cell(2, [CP2, RING, "model.mixer.pad_values=true"], "latent"),
    "latent-compiled-ac-selective": Cell(1, [f"{COMPILE}=true", f"{AC}.mode=selective"], "latent"),
    "tp2-latent": Cell(2, [TP2], "latent"),
    "tp2-latent-whole-positions": Cell(2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"], "latent"),
    "cp2-latent": Cell(2, [CP2], "latent"),
    "pp2-latent": Cell(2, pp2("1F1B"), "latent"),
    "tp2-fsdp2-latent": Cell(4, [TP2, HALF], "latent"),
    "hsdp2x2-tp2": Cell(8, [QUARTER, COPIES, TP2]),
    # mixture of experts
    "moe-accumulation4": Cell(1, FOUR_MICROBATCHES, "moe"),
    "moe-ac-full": Cell(1, [f"{AC}=true"], "moe"),
    "moe-ac-selective-compiled": Cell(1, [f"{AC}.mode=selective", f"{COMPILE}=true"], "moe"),
    "moe-ac-selective-compiled-biased": Cell(1, [f"{AC}.mode=selective", f"{COMPILE}=true"], "moe biased"),
    "moe-tp2-biased": Cell(2, [TP2], "moe biased"),
    "moe-tp2-fsdp2-whole-positions-biased": Cell(
        4, [TP2, HALF, "parallel.passes.tensor_parallel.sequence_parallel=false"], "moe biased"
    ),
    "moe-ep2-fsdp2-biased": Cell(4, [QUARTER, EP2], "moe biased"),
    "moe-ep2-tp2-biased": Cell(4, [HALF, EP2, TP2], "moe biased"),
    "moe-pp2-ep2-biased": Cell(4, [*pp2("1F1B", *TWO_SMALL_MICROBATCHES), EP2], "moe biased"),
    "moe-fsdp2": Cell(2, [HALF], "moe every second"),
    "moe-tp2": Cell(2, [TP2], "moe"),
    "moe-tp2-whole-positions": Cell(
        2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"], "moe every second"
    ),
    "moe-cp2-packed": Cell(2, [CP2], "moe packed"),
    "moe-ep2": Cell(2, [HALF, EP2], "moe"),
    "moe-ep2-phases": Cell(2, [HALF, EP2], "phases moe"),
    "moe-ep2-mixture": Cell(2, [HALF, EP2], "mixture moe"),
    "moe-ep2-every-second-ac-full": Cell(2, [*TWO_SMALL_MICROBATCHES, EP2, f"{AC}=true"], "moe every second"),
    "moe-ep2-ac-selective-packed": Cell(2, [HALF, EP2, f"{AC}.mode=selective"], "moe packed"),
    "moe-ep2-compiled": Cell(2, [HALF, EP2, f"{COMPILE}=true"], "moe"),
    "moe-ep2-cp2-packed": Cell(2, [CP2, EP2], "moe packed"),
    "moe-ep2-sums-shards": Cell(2, [EP2, *TWO_SMALL_MICROBATCHES, SHARDED_SUMS], "moe"),
    "moe-ep4": Cell(4, [QUARTER, "parallel.ep=4"], "moe"),
    "moe-ep2-fsdp2": Cell(4, [QUARTER, EP2], "moe"),
    "moe-ep2-fsdp2-ac-full-packed": Cell(4, [QUARTER, EP2, f"{AC}=true"], "moe packed"),
    "moe-ep2-copies2": Cell(4, [QUARTER, EP2, COPIES], "moe"),
    "moe-ep2-tp2": Cell(4, [HALF, EP2, TP2], "moe"),
    "moe-ep2-cp2-fsdp2": Cell(4, [HALF, CP2, EP2], "moe packed"),
    "moe-pp2": Cell(2, pp2("1F1B"), "moe every second"),
    "moe-pp2-hash": Cell(2, pp2("ZBVZeroBubble"), "moe hash"),
    "moe-ep2-hash": Cell(2, [HALF, EP2], "moe hash"),
    "moe-ep2-tp2-hash": Cell(4, [HALF, EP2, TP2], "moe hash"),
    "moe-ep2-fp8-ac-selective": Cell(2, [HALF, EP2, *EXPERTS_ONLY, f"{AC}.mode=selective"], "moe hash bf16", FP8),
    "moe-ep2-tp2-fp8": Cell(4, [HALF, EP2, TP2, *EXPERTS_ONLY], "moe hash bf16", FP8),
    "pp2-fsdp2-fp8-gathered": Cell(
        4, [*pp2("1F1B", *TWO_SMALL_MICROBATCHES), *EMULATED, f"{FP8_PASS}.all_gather=true"], "bf16", FP8
    ),
    "moe-pp2-fp8": Cell(2, [*pp2("ZBVZeroBubble"), *EXPERTS_ONLY], "moe hash bf16", FP8),
    "moe-pp2-ep2-gpipe": Cell(4, [*pp2("GPipe", *TWO_SMALL_MICROBATCHES), EP2], "moe"),
    "moe-pp2-ep2": Cell(4, [*pp2("1F1B", *TWO_SMALL_MICROBATCHES), EP2], "moe"),
    "moe-pp2-ep2-interleaved": Cell(4, [*pp2("Interleaved1F1B", *TWO_SMALL_MICROBATCHES), EP2], "moe every second"),
    "moe-pp2-ep2-interleaved-zero-bubble": Cell(
        4, [*pp2("InterleavedZeroBubble", *TWO_SMALL_MICROBATCHES), EP2], "moe packed"
    ),
    "moe-pp2-ep2-zero-bubble-v": Cell(4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), EP2], "moe"),
    "moe-pp2-ep2-dualpipe-v-packed": Cell(4, [*pp2("DualPipeV"), CP2, EP2], "moe packed"),
    "moe-pp2-ep2-fsdp2": Cell(8, [*pp2("1F1B", *TWO_SMALL_MICROBATCHES), CP2, EP2], "moe packed"),
    "moe-pp2-ep2-tp2": Cell(8, [*pp2("1F1B", *TWO_SMALL_MICROBATCHES), EP2, TP2], "moe"),
    "moe-ep4-hierarchical": Cell(4, [QUARTER, "parallel.ep=4", TWO_NODES], "moe every second"),
    "moe-ep4-hierarchical-chunks2-ac-full-packed": Cell(
        4, [QUARTER, "parallel.ep=4", TWO_NODES, OVERLAP, f"{EXPERTS}.chunks=2", f"{AC}=true"], "moe packed"
    ),
    "moe-ep2-overlap-compiled": Cell(2, [HALF, EP2, OVERLAP, f"{COMPILE}=true"], "moe"),
    "moe-ep2-tp2-overlap-chunks3": Cell(4, [HALF, EP2, TP2, OVERLAP, f"{EXPERTS}.chunks=3"], "moe"),
    "moe-pp2-ep2-zero-bubble-v-overlap": Cell(
        4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), EP2, OVERLAP], "moe every second"
    ),
    "moe-ep2-expert-choice-chunks2": Cell(
        2, [*TWO_SMALL_MICROBATCHES, EP2, OVERLAP, f"{EXPERTS}.chunks=2"], "moe expert choice"
    ),
    "moe-tp2-expert-choice-ac-full": Cell(2, [TP2, f"{AC}=true"], "moe expert choice"),
    "moe-pp2-zero-bubble-v-compiled-ac-full": Cell(2, [*pp2("ZBVZeroBubble"), f"{COMPILE}=true", f"{AC}=true"], "moe"),
    "moe-pp2-ep2-zero-bubble-v-compiled": Cell(
        4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), EP2, f"{COMPILE}=true"], "moe"
    ),
    "moe-pp2-dualpipe-v-ac-selective": Cell(2, [*pp2("DualPipeV"), f"{AC}.mode=selective"], "moe"),
    "moe-pp2-dualpipe-v-compiled-ac-selective": Cell(
        2, [*pp2("DualPipeV"), f"{COMPILE}=true", f"{AC}.mode=selective"], "moe"
    ),
    # what predicts learns from detached hidden states, which zero-bubble schedules go through apart
    "moe-pp2-expert-choice": Cell(2, pp2("ZBVZeroBubble"), "moe expert choice"),
    "moe-tp2-capacity": Cell(2, [TP2], "moe capacity"),
    "moe-pp2-ep2-capacity-ac-full": Cell(
        4, [*pp2("ZBVZeroBubble", *TWO_SMALL_MICROBATCHES), EP2, f"{AC}=true"], "moe capacity"
    ),
    "moe-ep2-sinkhorn-compiled": Cell(2, [*TWO_SMALL_MICROBATCHES, EP2, f"{COMPILE}=true"], "moe sinkhorn"),
    "moe-pp2-sinkhorn": Cell(2, pp2("1F1B"), "moe sinkhorn"),
    "moe-tp2-noisy-ac-full": Cell(2, [TP2, f"{AC}=true"], "moe noisy"),
    # multi-token prediction
    "ahead-accumulation4": Cell(1, FOUR_MICROBATCHES, "ahead"),
    "ahead-microbatches2-moe-packed": Cell(1, TWO_MICROBATCHES, "ahead moe packed"),
    "ahead-chunked": Cell(1, CHUNKED, "ahead"),
    "ahead-ac-full": Cell(1, [f"{AC}=true"], "ahead"),
    "ahead-ac-auto": Cell(1, auto(0.008), "ahead"),
    "ahead-compiled-ac-selective": Cell(1, [f"{COMPILE}=true", f"{AC}.mode=selective"], "ahead packed"),
    "ahead-compiled-whole-model": Cell(1, [f"{COMPILE}.whole_model=true"], "ahead"),
    "ahead-fsdp2-microbatches2-packed": Cell(2, TWO_SMALL_MICROBATCHES, "ahead packed"),
    "ahead-fsdp2-moe-packed": Cell(2, [HALF], "ahead moe packed"),
    "ahead-tp2": Cell(2, [TP2], "ahead"),
    "ahead-tp2-chunked-packed": Cell(2, [TP2, *CHUNKED], "ahead packed"),
    "ahead-tp2-whole-positions": Cell(2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"], "ahead"),
    "ahead-cp2-moe-packed": Cell(2, [CP2], "ahead moe packed"),
    "ahead-cp2-ring": Cell(2, [CP2, RING], "ahead"),
    "ahead-pp2-1f1b": Cell(2, pp2("1F1B"), "ahead"),
    "ahead-pp2-interleaved-zero-bubble-packed": Cell(2, pp2("InterleavedZeroBubble"), "ahead packed"),
    "ahead-pp2-zero-bubble-v-chunked": Cell(2, [*pp2("ZBVZeroBubble"), *CHUNKED], "ahead"),
    "ahead-pp2-dualpipe-v": Cell(2, pp2("DualPipeV"), "ahead"),
    "ahead-pp2-gpipe-ac-full": Cell(2, [*pp2("GPipe"), f"{AC}=true"], "ahead"),
    "ahead-pp2-zero-bubble-v-ac-selective": Cell(2, [*pp2("ZBVZeroBubble"), f"{AC}.mode=selective"], "ahead packed"),
    "ahead-pp2-fsdp2": Cell(4, pp2("1F1B", *TWO_SMALL_MICROBATCHES), "ahead"),
    "ahead-pp2-tp2-packed": Cell(4, [*pp2("Interleaved1F1B"), TP2], "ahead packed"),
    "ahead-pp2-tp2-whole-positions": Cell(
        4, [*pp2("1F1B"), TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"], "ahead"
    ),
    "ahead-pp2-cp2-moe-packed": Cell(4, [CP2, *pp2("1F1B", *TWO_MICROBATCHES)], "ahead moe packed"),
    "ahead-pp2-ep2-moe-packed": Cell(4, [*pp2("1F1B", *TWO_SMALL_MICROBATCHES), EP2], "ahead moe packed"),
    # images among text
    **looking_cells("joint"),
    **looking_cells("crossed"),
    **looking_cells("mixture of transformers"),
    **looking_cells("moma", cp=False),
    "moma-ep2": Cell(2, [HALF, EP2], "moma"),
    "moma-fsdp2-ac-full": Cell(2, [HALF, f"{AC}=true"], "moma"),
    **{
        name: cell
        for name, cell in looking_cells("moma noisy", cp=False).items()
        if name.endswith(("-accumulation4", "-fsdp2", "-ac-full", "-interleaved-tp2"))
    },
    "joint-cut-tp2": Cell(2, [TP2], "joint cut"),
    "joint-cut-tp2-whole-positions": Cell(
        2, [TP2, "parallel.passes.tensor_parallel.sequence_parallel=false"], "joint cut"
    ),
    "joint-cut-tp2-fsdp2-ac-full": Cell(4, [TP2, HALF, f"{AC}=true"], "joint cut"),
    "joint-cut-pp2-interleaved-tp2": Cell(4, [*pp2("Interleaved1F1B"), TP2], "joint cut"),
    "moma-noisy-ep2": Cell(2, [HALF, EP2], "moma noisy"),
    **{name: cell for name, cell in looking_cells("joint packed").items() if "compiled" not in name},
    **{name: cell for name, cell in looking_cells("crossed packed").items() if "compiled" not in name},
    **{name: cell for name, cell in looking_cells("joint frozen then thawed").items() if "compiled" not in name},
    **looking_cells("joint mrope", cp=False),
    **looking_cells("joint padded"),
    **looking_cells("joint among text"),
    **looking_cells("joint of two sizes"),
    **looking_cells("crossed of two sizes"),
    **{name: cell for training in IN_BF16 for name, cell in bf16_cells(training).items()},
    **replayed_cells(),
    "moma-bf16-ep2": Cell(2, [HALF, EP2], "moma bf16", BF16),
    "moma-bf16-fsdp2-ac-full": Cell(2, [HALF, f"{AC}=true"], "moma bf16", BF16),
    # other optimizers
    # what is rounded off decides on a sign now and then, on one kind of CPU and not on another
    **optimizer_cells("lion", 2e-4),
    **optimizer_cells("muon"),
    **optimizer_cells("schedule free"),
    **optimizer_cells("factored"),
    **{name: cell for name, cell in optimizer_cells("complete p").items() if name.removeprefix("complete-p-") in _FEW},
    # what is rounded off decides on a code now and then
    "eight-bit-fsdp2": Cell(2, [HALF], "eight bit", 2e-4),
    "eight-bit-tp2-fsdp2": Cell(4, [TP2, HALF], "eight bit", 2e-4),
    "split-fsdp2": Cell(2, [HALF], "split", BF16),
    "split-hsdp2x2": Cell(4, [QUARTER, COPIES], "split", BF16),
    "split-tp2": Cell(2, [TP2], "split", BF16),
    "split-tp2-fsdp2": Cell(4, [TP2, HALF], "split", BF16),
    "split-pp2": Cell(2, pp2("1F1B"), "split", BF16),
}

FAMILIES = ("one process", "fsdp2", "hsdp2x2", "tp2", "pp2-interleaved", "pp2-fsdp2", "cp2", "tp2-fsdp2")
"""Cells whose checkpoints are resumed in each other's layouts; ``one process`` is the plain training itself."""
MOE_FAMILIES = ("moe-accumulation4", "moe-ep2", "moe-ep4", "moe-pp2-ep2")
"""The same for experts; the first is one process."""
PACKED_FAMILIES = ("packed-accumulation4", "fsdp2-packed", "tp2-packed", "pp2-1f1b-packed")
"""The same for packed documents, each resumed in the next; with and without accumulation."""
MUON_FAMILIES = ("muon-accumulation4", "muon-fsdp2", "muon-tp2-fsdp2", "muon-pp2", "muon-tp2")
"""The same for an optimizer of whole matrices."""
DROPOUT_FAMILIES = (
    *("attention-dropout-accumulation4", "attention-dropout-fsdp2", "attention-dropout-cp2"),
    "attention-dropout-pp2-tp2",
)
"""The same for noise."""
LOOKING_FAMILIES = ("crossed-accumulation4", "crossed-fsdp2", "crossed-tp2", "crossed-pp2")
"""The same for images, whose tokens travel between stages."""
FACTORED_FAMILIES = ("factored-accumulation4", "factored-fsdp2", "factored-tp2", "factored-tp2-fsdp2")
"""The same for an optimizer whose state has other shapes than parameters."""
