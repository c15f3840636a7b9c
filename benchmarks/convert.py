"""What ``forge convert`` takes, in memory and time, beside copying the files.

    python benchmarks/convert.py [--mib 1024]

A Llama with random weights, in fp32 and in safetensors of at most a quarter of the whole, is converted to a checkpoint
and back, and read from the folder itself into parameters that are in memory, as ``[checkpoint.load]`` does. Each of
these, and the copy, is a process of its own, which first does the same with a model of one block.
All that is written is flushed to the disk. Memory is the process's own (``RssAnon``: mapped files do not count) at its
peak, above the start. Allowed for 1 GiB: 0.35 GiB above the start, and 1.3 times the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch

from forge_plugins_hf.shards import Described, write_shards

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
VOCABULARY = 8192
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of the weights in fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(WAYS[arguments.measure])))
        return
    with tempfile.TemporaryDirectory() as name:
        n_bytes = write_model(Path(name) / "hf", arguments.mib * MIB)
        write_model(Path(name) / "first" / "hf", 0)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way in WAYS:
                found[way].append(in_a_process(way, Path(name)))
    report(n_bytes, found)


def write_model(folder: Path, n_bytes: int) -> int:
    """A downloaded model of about so many bytes."""
    dim, hidden, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["hidden_size"] // 4
    block = {
        **{f"self_attn.{one}_proj": (dim, dim) for one in "qo"},
        **{f"self_attn.{one}_proj": (kv, dim) for one in "kv"},
        **{f"mlp.{one}_proj": (hidden, dim) for one in ("gate", "up")},
        "mlp.down_proj": (dim, hidden),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    ends = {"model.embed_tokens": (VOCABULARY, dim), "model.norm": (dim,), "lm_head": (VOCABULARY, dim)}
    size = sum(torch.Size(shape).numel() for shape in block.values())
    n_layers = max(1, round((n_bytes / 4 - 2 * VOCABULARY * dim) / size))
    shapes = ends | {f"model.layers.{i}.{name}": shape for i in range(n_layers) for name, shape in block.items()}
    described = [Described(f"{name}.weight", torch.Size(shape), torch.float32) for name, shape in shapes.items()]
    by_name = {one.name: one.shape for one in described}
    folder.mkdir(parents=True)
    write_shards(folder, described, lambda name: torch.randn(by_name[name]), most_bytes=max(MIB, n_bytes // 4))
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "num_hidden_layers": n_layers, **SHAPE}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}))
    return sum(one.n_bytes for one in described)


def in_a_process(way: str, folder: Path) -> tuple[float, float]:
    """Seconds, and bytes above the start."""
    command = [sys.executable, __file__, "--measure", way]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    seconds, n_bytes = json.loads(done.stdout.splitlines()[-1])
    for written in ("copy", "back", *(["ours"] if way == "back" else [])):
        for path in (folder / written, folder / "first" / written):
            shutil.rmtree(path, ignore_errors=True)
    os.sync()
    return seconds, n_bytes


def measured(way: Callable[[], None]) -> tuple[float, float]:
    with chdir("first"):
        PREPARED[way]()
        way()  # what is imported and compiled once
    PREPARED[way]()
    with peak_above_start() as peak:
        started = time.perf_counter()
        way()
        seconds = time.perf_counter() - started
    return seconds, peak[0]


@contextmanager
def peak_above_start() -> Iterator[list[float]]:
    start, peak, is_over = own_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], own_memory() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def own_memory() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def copy() -> None:
    """As ``cp`` does, and flushed."""
    Path("copy").mkdir()
    for file in Path("hf").iterdir():
        with file.open("rb") as source, (Path("copy") / file.name).open("wb") as target:
            while os.sendfile(target.fileno(), source.fileno(), None, 64 * MIB):
                pass
            os.fsync(target.fileno())


def to_forge() -> None:
    convert("hf", "--to", "forge", "--out", "ours")


def back() -> None:
    convert("ours/checkpoint", "--to", "huggingface", "--out", "back")
    for file in Path("back").iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


PARAMETERS: dict[str, torch.Tensor] = {}
"""What ``load`` fills, by the names of our model."""


def allocate() -> None:
    PARAMETERS.clear()
    PARAMETERS.update({name: torch.zeros(shape) for name, shape in opened().shapes().items()})
    for parameter in PARAMETERS.values():
        parameter.fill_(1)  # so that its memory is there


@torch.no_grad()
def load() -> None:
    weights = opened()
    for name, parameter in PARAMETERS.items():
        parameter.copy_(weights.read(name, [slice(0, size) for size in parameter.shape]))


def opened() -> Any:
    """The weights of the folder, as a run opens them."""
    from forge_core.config.builder import ComponentBuilder
    from forge_core.registry.discovery import discover
    from forge_plugins_hf.config_json import ReadKeys, read_config
    from forge_plugins_hf.layouts import layout_of_architecture
    from forge_plugins_hf.weight_source import HuggingFaceFolder

    folder, catalog = Path("hf"), discover()
    table = layout_of_architecture("LlamaForCausalLM", catalog).model_table(ReadKeys(read_config(folder)))
    model = ComponentBuilder(catalog).resolve("model", table)
    return HuggingFaceFolder(None).open(folder, model, catalog, print)


def convert(*words: str) -> None:
    from forge_core.cli import main as forge

    if forge(["convert", *words]) != 0:
        sys.exit(f"forge convert {' '.join(words)} has failed")


WAYS: dict[str, Callable[[], None]] = {"copy": copy, "to_forge": to_forge, "back": back, "load": load}
PREPARED: dict[Callable[[], None], Callable[[], None]] = dict.fromkeys(WAYS.values(), lambda: None) | {load: allocate}
"""What is done before the clock starts."""


def report(n_bytes: int, found: dict[str, list[tuple[float, float]]]) -> None:
    copied = statistics.median(seconds for seconds, _ in found["copy"])
    print(f"{n_bytes / 2**30:.2f} GiB of weights; median of {len(found['copy'])} runs, the highest peak\n")
    print(f"{'':12}{'seconds':>10}{'of a copy':>12}{'GiB above the start':>22}")
    for way, values in found.items():
        seconds = statistics.median(one for one, _ in values)
        print(f"{way:12}{seconds:10.2f}{seconds / copied:12.2f}{max(peak for _, peak in values) / 2**30:22.3f}")


if __name__ == "__main__":
    main()
