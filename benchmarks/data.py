"""How fast samples are read: memory-mapped, packed, in stream order, through the loader.

    python benchmarks/data.py

Each row is a median over runs that alternate with those of the other rows, in tokens a second and relative to what a
plain map-style dataset does (a slice, a conversion and a stack for each sample). The file fits in the page cache: this
measures us and not the disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.shard_writer import ShardWriter
from forge_plugins_data.token_files import open_token_files
from forge_plugins_data.token_format import INDEX, TokenHeader, write_header

BATCH, SEQ_LEN, VOCAB, END = 8, 4096, 50_000, 0
FILE_TOKENS = 64 * 2**20
DOCUMENT_TOKENS = 700
RUNS, BATCHES_A_RUN = 15, 100


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder))
        rows = measure(Path(folder))
    plain = rows["plain map-style dataset"]
    print(f"batches of {BATCH} × {SEQ_LEN} tokens, median of {RUNS} alternating runs of {BATCHES_A_RUN} batches\n")
    print(f"{'':34}{'M tokens/s':>12}{'ratio':>9}")
    for name, speed in rows.items():
        print(f"{name:34}{speed / 1e6:12,.0f}{speed / plain:9.2f}")


def write_tokens(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "tokens.bin", dtype="uint16", end_of_document=END) as writer:
        for _ in range(FILE_TOKENS // DOCUMENT_TOKENS):
            writer.add(rng.integers(1, VOCAB, DOCUMENT_TOKENS - 1))
        shard = writer.finish()
    write_header(folder / INDEX, TokenHeader(dtype="uint16", vocab_size=VOCAB, end_of_document=END, shards=(shard,)))


def measure(folder: Path) -> dict[str, float]:
    def source(**keys: bool) -> object:
        return open_token_files(TokenFilesConfig(path=str(folder), **keys), seq_len=SEQ_LEN, split="train", build=None)

    plain, packed = source(), source(document_mask=True)
    random_indices = np.random.default_rng(1).integers(0, len(plain), (10_000, BATCH))
    contenders: dict[str, Iterator[object]] = {
        "plain map-style dataset": plain_dataset(folder / "tokens.bin", random_indices),
        "token_files": (plain.read(indices) for indices in random_indices),
        "token_files, document_mask": (packed.read(indices) for indices in random_indices),
        "shuffled stream": shuffled(SampleStream(plain, 0, True)),
    }
    loaders = {}
    for workers in (0, 1, 2):
        loaders[f"loader, {workers} workers"] = loader(plain, workers)
        loaders[f"loader, {workers} workers, packed"] = loader(packed, workers)
    contenders |= loaders
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(RUNS):
        for name, batches in contenders.items():
            seconds[name].append(timed(lambda batches=batches: next(batches)))
    for one in loaders.values():
        one.close()
    return {name: BATCH * SEQ_LEN / statistics.median(times) for name, times in seconds.items()}


def timed(step: Callable[[], object]) -> float:
    step()
    started = time.perf_counter()
    for _ in range(BATCHES_A_RUN):
        step()
    return (time.perf_counter() - started) / BATCHES_A_RUN


def plain_dataset(file: Path, order: np.ndarray) -> Iterator[object]:
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    for indices in order:
        samples = [torch.from_numpy(tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].astype(np.int64)) for i in indices]
        yield torch.stack([sample[:-1] for sample in samples]), torch.stack([sample[1:] for sample in samples])


def shuffled(stream: SampleStream) -> Iterator[object]:
    position = 0
    while True:
        yield stream.read(position + np.arange(BATCH))
        position += BATCH


def loader(source: object, workers: int) -> BatchLoader:
    return BatchLoader(
        SampleStream(source, 0, True),
        position=0,
        batch_size=BATCH,
        grad_accumulation=1,
        dp_rank=0,
        dp_size=1,
        workers=workers,
        prefetch=4,
        pin_memory=False,
    )


if __name__ == "__main__":
    main()
