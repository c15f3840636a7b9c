"""Vision-language models: steps, decoding, packing, images into tiles, and the shapes task.

    python benchmarks/vlm.py step|modalities|decoding|packing|preprocessing|shapes

``step``: a step of the joint decoder against the text model of equal token count, and against that and the encoder
alone; what the encoder keeps for backward, trained and frozen. ``modalities``: blocks with weights of each modality,
products by groups against all positions through both, and against blocks of text. ``decoding``: a token after a prompt
with images, against one after text of that length; cross-attention in place of a layer's own, and in a layer inserted
before it, which is one of five then, beside text of five. ``packing``: answer tokens a second, packed against padded,
and the loss curves of two short trainings.
``preprocessing``: images per second of one core, from the bytes of a JPEG to tiles of 224 pixels. ``shapes``: steps and
seconds of training until the four architectures caption 95 % of 128 held-out shapes, and what they come to at the end.

All are ratios, or figures, of one run: alternating rounds, medians.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_core.train.initialisation import SeededInitializer
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_moe.grouped import takes_grouped
from forge_plugins_vlm.contracts.image_processor import ImageProcessor, ImageProcessorConfig
from forge_plugins_vlm.fusions import by_modality
from forge_plugins_vlm.images.anyres import Anyres
from forge_plugins_vlm.images.config import AnyresConfig, NaflexConfig, SquareConfig, TilesConfig
from forge_plugins_vlm.images.naflex import Naflex
from forge_plugins_vlm.images.picture import open_picture
from forge_plugins_vlm.images.square import Square
from forge_plugins_vlm.images.tiles import Tiles

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 1000
SIZES = ((640, 480), (1024, 768), (2048, 1536), (320, 240))
RUNS, IMAGES_A_RUN = 9, 32
PACKED_STEPS = 80


def main() -> None:
    sections = {
        "step": step,
        "modalities": modalities,
        "decoding": decoding,
        "packing": packing,
        "preprocessing": preprocessing,
        "shapes": shapes,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=sections)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600, help="of the shapes task")
    parser.add_argument("--seeds", type=int, default=3, help="of the shapes task")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sections[given.section](given)


def step(given: argparse.Namespace) -> None:
    text, joint, frozen = build(given, "transformer"), build(given), build(given, freeze_encoder=True)
    inputs = batch(given, 8)
    tokens, targets = inputs.pop("tokens"), inputs.pop("targets")

    def trained(model: Any, **entries: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            logits = model(tokens, **entries)
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            model.zero_grad(set_to_none=True)

        return run

    def encoder(model: Any, *, is_trained: bool) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(is_trained):
                given_tokens = model.vision(inputs["pixels"])
            if is_trained:
                given_tokens.sum().backward()
                model.zero_grad(set_to_none=True)

        return run

    names = ("text", "joint", "joint, frozen encoder", "encoder and connector", "the same, frozen, forward alone")
    runs = [trained(text), trained(joint, **inputs), trained(frozen, **inputs)]
    runs += [encoder(joint, is_trained=True), encoder(frozen, is_trained=False)]
    times = dict(zip(names, medians(runs, given.rounds), strict=True))
    for name, seconds in times.items():
        print(f"{name:34}{1000 * seconds:10.1f} ms{seconds / times['text']:8.2f} of text")
    own = times["joint"] - times["encoder and connector"]
    print(f"joint without its encoder {own / times['text']:.3f} of text (wanted: at most 1.05)")
    for name, model in (("trained", joint), ("frozen", frozen)):
        print(f"kept for backward by the encoder, {name}: {kept_bytes(model, inputs['pixels']) / 2**20:.1f} MiB")


def modalities(given: argparse.Namespace) -> None:
    """A forward and backward of the blocks of a batch of 8 rows, in which 64 positions of a row are of an image."""
    slots = batch(given, 8)["image_slots"]
    hidden = torch.randn(*slots.shape, given.dim, generator=torch.Generator().manual_seed(0))
    angles = torch.empty(1, given.positions, 1, 0)
    surroundings = BlockInputs(angles, angles, causal=True, facts={"image_slots": slots})

    def run_of(model: Any, *, by_groups: bool = True) -> Callable[[], None]:
        def run() -> None:
            read = hidden
            with mock.patch.object(by_modality, "takes_grouped", lambda weight: by_groups and takes_grouped(weight)):
                for block in model.blocks.values():
                    read = block(read, surroundings)
            read.square().sum().backward()
            model.zero_grad(set_to_none=True)

        return run

    text = build(given, "transformer")
    for fusion in ({"name": "mixture_of_transformers"}, {"name": "moma", "image": "mlp"}):
        model = build(given, fusion=fusion)
        groups, both, dense = medians([run_of(model), run_of(model, by_groups=False), run_of(text)], given.rounds)
        print(f"{fusion['name']:26}{1000 * groups:8.1f} ms by groups, {groups / dense:.2f} of blocks of text")
        print(f"{'':26}{1000 * both:8.1f} ms through both, {both / dense:.2f} of them: {both / groups:.2f} by groups")


def kept_bytes(model: Any, pixels: torch.Tensor) -> int:
    """What autograd saves in the encoder's forward, parameters left out."""
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}
    features: list[Any] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trains = any(one.requires_grad for one in model.vision.encoder.parameters())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), torch.set_grad_enabled(trains):
        features.append(model.vision.encoder(pixels.flatten(0, 1)))
    return sum(kept.values())


def decoding(given: argparse.Namespace) -> None:
    """The cache is filled by the prompt; rounds then each decode some tokens. A layer that is inserted computes as
    much as one of text, so that its model is compared with text of as many layers."""
    more = argparse.Namespace(**{**vars(given), "layers": given.layers + 1})
    in_place, inserted = "cross-attention, in place", "cross-attention, inserted"
    models = {
        (text := f"text of {given.layers} layers"): build(given, "transformer"),
        (deeper := f"text of {more.layers} layers"): build(more, "transformer"),
        "joint": build(given),
        in_place: build(given, fusion={"name": "cross_attention", "place": "replace"}),
        inserted: build(given, fusion={"name": "cross_attention", "layers": [given.layers - 1]}),
    }
    with torch.no_grad():
        rounds = [a_token_of_each(models, given) for _ in range(given.rounds + 1)][1:]
    for name in models:
        equal = deeper if name in (inserted, deeper) else text
        milliseconds = 1000 * statistics.median(one[name] for one in rounds)
        of_text, of_equal = (statistics.median(one[name] / one[other] for one in rounds) for other in (text, equal))
        said = f"{milliseconds:8.2f} ms a token of 4 rows{of_text:8.3f} of {text}"
        print(f"{name:28}{said}{of_equal:8.3f} of text of as many layers (wanted: 1.1)")


def a_token_of_each(models: Mapping[str, Any], given: argparse.Namespace) -> dict[str, float]:
    """Seconds of a token by model, the median of 32 for which the models take turns."""
    inputs = batch(given, 4)
    tokens = inputs.pop("tokens")[:, : given.positions - 40]
    inputs.pop("targets")
    entries = {key: one if key == "pixels" else one[:, : tokens.shape[1]] for key, one in inputs.items()}
    caches, times = {}, {name: [] for name in models}
    for name, model in models.items():
        caches[name] = model.eval().make_cache(len(tokens), given.positions)
        model(tokens, cache=caches[name], **({} if "text" in name else entries))
    for _ in range(32):
        for name, model in models.items():
            start = time.perf_counter()
            model(tokens[:, :1], cache=caches[name])
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(one) for name, one in times.items()}


def packing(given: argparse.Namespace) -> None:
    """Of the shapes task: 22 tokens a conversation, in samples of as many positions as asked for. The two curves begin
    with equal weights and have about as many answer tokens in a step. Each of their points is a mean over ten steps."""
    build_component = ComponentBuilder(discover(()))
    with tempfile.TemporaryDirectory() as folder:
        folder = f"{folder}/shapes"
        draw(Path(folder), 256, 16)

        def opened(packed: bool, positions: int) -> Any:
            use = build_component.resolve("data_source", {**data_table(folder), "packing": packed, "max_images": 64})
            return build_component(use, seq_len=positions, split="all", seed=0, samples_per_step=8)

        sources = [opened(packed, given.positions) for packed in (False, True)]
        model = build(given, encoder={"name": "conv_vit"}, vocab_size=sources[0].vocab_size)
        runs, answers = [], []
        for source in sources:
            read = {name: torch.from_numpy(one) for name, one in source.read(np.arange(8)).items()}
            tokens, targets = read.pop("tokens"), read.pop("targets")
            answers.append(int((targets != -100).sum()))

            def run(tokens: torch.Tensor = tokens, targets: torch.Tensor = targets, read: Any = read) -> None:
                logits = model(tokens, **read)
                F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
                model.zero_grad(set_to_none=True)

            runs.append(run)
        padded, packed = (n / seconds for n, seconds in zip(answers, medians(runs, given.rounds), strict=True))
        per_step = 2 * round(answers[1] / answers[0])  # conversations that two packed samples have
        curves = [curve(given, source, rows) for source, rows in ((opened(False, 32), per_step), (sources[1], 2))]
    print(f"answer tokens a second: padded {padded:,.0f}, packed {packed:,.0f}: {packed / padded:.2f} (wanted: 1.6)")
    for name, (losses, n_answers) in zip(("padded", "packed"), curves, strict=True):
        print(f"{name}: {n_answers:,} answer tokens, losses {' '.join(f'{one:.3f}' for one in losses)}")
    apart = max(abs(one - other) for one, other in zip(curves[0][0], curves[1][0], strict=True))
    print(f"the curves are at most {apart:.3f} apart")


def curve(given: argparse.Namespace, source: Any, rows: int) -> tuple[list[float], int]:
    """The losses of a training, eight means one after another, and how many answer tokens it has seen."""
    model = build(given, encoder={"name": "conv_vit"}, vocab_size=source.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = np.random.default_rng(0).permutation(len(source))
    losses, n_answers = [], 0
    for step in range(PACKED_STEPS):
        chosen = order[np.arange(step * rows, (step + 1) * rows) % len(order)]
        read = {name: torch.from_numpy(one) for name, one in source.read(chosen).items()}
        tokens, targets = read.pop("tokens"), read.pop("targets")
        loss = F.cross_entropy(model(tokens, **read).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        n_answers += int((targets != -100).sum())
    return [statistics.mean(part) for part in np.split(np.array(losses), 8)], n_answers


def shapes(given: argparse.Namespace) -> None:
    print(f"{'':26}{'seed':>5}{'steps to 0.95':>15}{'seconds':>9}{'all':>7}{'real':>8}{'shuffled':>10}{'blank':>8}")
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder) / "shapes", 4096, 512)
        for name in ("joint_decoder", "cross_attention", "mixture_of_transformers", "moma"):
            for seed in range(given.seeds):
                found = train(Path(folder), name, seed, given.steps)
                print(f"{name:26}{seed:5}{found}", flush=True)


def train(folder: Path, name: str, seed: int, steps: int) -> str:
    table = {**data_table("shapes", "held_out.json")}
    evaluations = [
        {"name": "image_answers", "label": "soon", "interval": 50, "samples": 128, "max_new_tokens": 6, "data": table},
        {"name": "image_dependence", "max_new_tokens": 6, "data": table},
    ]
    run = f"{name}-{seed}"
    command = [sys.executable, "-m", "forge_core", "run", str(ROOT / f"configs/vlm/{name}.toml"), f"run.name={run}"]
    command += [
        f"train.seed={seed}",
        f"train.steps={steps}",
        f"evaluations={toml(evaluations)}",
        "checkpoint.interval=0",
    ]
    subprocess.run([*command, "metrics.interval=10"], cwd=folder, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    seconds, reached = 0.0, None
    for line in lines:
        seconds += 10 * line.get("step_seconds", 0.0)
        if reached is None and line.get("eval/soon/exact_match", 0) >= 0.95:
            reached = line["step"], seconds
    last = {
        key: value for line in lines for key, value in line.items() if key.startswith("eval/image_dependence/exact")
    }
    at = f"{reached[0]:15}{reached[1]:9.0f}" if reached else f"{'not reached':>15}{'':9}"
    ends = [last[f"eval/image_dependence/exact_match/{kind}"] for kind in ("real", "shuffled", "blank")]
    return f"{at}{seconds:7.0f}{ends[0]:8.3f}{ends[1]:10.3f}{ends[2]:8.3f}"


def toml(value: Any) -> str:
    """Inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def data_table(folder: str | Path, file: str = "train.json") -> dict[str, Any]:
    """Of the shapes task, of 16 tokens an image."""
    return {
        "name": "image_text",
        "path": f"{folder}/{file}",
        "format": "llava",
        "token_grid": [4, 4],
        "processor": {"name": "square", "size": 32},
        "tokenizer": {"name": "tokenizer_file", "path": f"{folder}/tokenizer.json"},
    }


def draw(folder: Path, train: int, held_out: int) -> None:
    command = [sys.executable, "-m", "forge_core", "vlm", "shapes", "--out", str(folder), "--train", str(train)]
    subprocess.run([*command, "--held-out", str(held_out)], check=True, capture_output=True)


def build(given: argparse.Namespace, name: str = "vision_language", vocab_size: int = VOCABULARY, **keys: Any) -> Any:
    """A decoder as asked for, with an encoder of half its width and 64 features of a tile of 64 × 64 pixels."""
    encoder = {"name": "conv_vit", "size": [64, 64], "dim": given.dim // 2, "n_layers": given.layers, "n_heads": 4}
    own = {"encoder": encoder} if name == "vision_language" else {}
    shape = {"dim": given.dim, "n_layers": given.layers, "n_heads": 4, "max_seq_len": given.positions}
    builder = ComponentBuilder(discover(()))
    with torch.device("meta"):
        model = builder(builder.resolve("model", {"name": name, **shape, **own, **keys}), vocab_size=vocab_size)
    model.to_empty(device="cpu")
    model.init_weights(SeededInitializer(0))
    return model


def batch(given: argparse.Namespace, rows: int) -> dict[str, torch.Tensor]:
    """Rows with an image of 64 tokens at their beginning."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, given.positions)
    slots, bounds = torch.full(shape, -1), torch.zeros(*shape, 3, dtype=torch.int64)
    slots[:, :64], bounds[..., 2] = torch.arange(64), 1
    tokens, targets = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    pixels = torch.randint(0, 256, (rows, 1, 3, 64, 64), dtype=torch.uint8, generator=generator)
    return {"tokens": tokens, "targets": targets, "pixels": pixels, "image_slots": slots, "image_range": bounds}


def medians(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each, in alternating rounds after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        seconds = []
        for run in runs:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        times.append(seconds)
    return [statistics.median(one) for one in zip(*times[1:], strict=True)]


def preprocessing(_: argparse.Namespace) -> None:
    processors = {
        "square, stretch": (square := SquareConfig(size=224), Square(square)),
        "square, crop": (crop := SquareConfig(size=224, fit="crop"), Square(crop)),
        "anyres": (anyres := AnyresConfig(size=224), Anyres(anyres)),
        "anyres, by torch": (anyres := AnyresConfig(size=224, resampler="torch"), Anyres(anyres)),
        "tiles": (tiles := TilesConfig(size=224, longest=3), Tiles(tiles)),
        "tiles, by torch": (tiles := TilesConfig(size=224, longest=3, resampler="torch"), Tiles(tiles)),
        "naflex, 256 patches": (naflex := NaflexConfig(), Naflex(naflex)),
    }
    print(f"images and tiles per second of processor time, median of {RUNS} runs of {IMAGES_A_RUN} JPEGs\n")
    print(f"{'':24}" + "".join(f"{f'{width} × {height}':>16}" for width, height in SIZES))
    for name, (config, processor) in processors.items():
        rates = [images_a_second(config, processor, jpeg(*size)) for size in SIZES]
        tiles = [processor.layout((height, width), (14, 14)).n_tiles for width, height in SIZES]
        cells = (f"{rate:,.0f}, {rate * n:,.0f}" for rate, n in zip(rates, tiles, strict=True))
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells))


def jpeg(width: int, height: int) -> bytes:
    """Of smooth noise with edges, which compresses about as photographs do."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = pixels + rng.normal(0, 6, pixels.shape)
    pixels[:, width // 3 : width // 2] //= 2
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def images_a_second(config: ImageProcessorConfig, processor: ImageProcessor, content: bytes) -> float:
    rates = []
    for _ in range(RUNS):
        start = time.process_time()
        for _ in range(IMAGES_A_RUN):
            processor(open_picture(content, config.at_least), (14, 14))
        rates.append(IMAGES_A_RUN / (time.process_time() - start))
    return statistics.median(rates)


if __name__ == "__main__":
    main()
