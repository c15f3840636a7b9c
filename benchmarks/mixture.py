"""How fast a mixture of four memory-mapped sources is read, beside one shuffled stream of the same files; and how fast
documents are packed by best fit.

    python benchmarks/mixture.py

Medians over runs that alternate, in tokens a second; the files fit in the page cache. At least 0.6 of one stream is
wanted of the mixture; of best fit, that the standard library's files, a byte a token, are packed at 40 M tokens/s with
at most 2 % of the positions empty.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
from pathlib import Path

import data  # benchmarks/data.py: the files, the stream and the clock
import numpy as np

from forge_core.config.builder import ComponentBuilder
from forge_core.data.stream import SampleStream
from forge_core.registry.discovery import discover
from forge_plugins_data.best_fit import PackedDocuments, find_documents
from forge_plugins_data.token_samples import TokenFacts

SHARES = (0.5, 0.3, 0.15, 0.05)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(len(SHARES)):
            (folder / str(number)).mkdir()
            data.write_tokens(folder / str(number))
        seconds = measure(folder)
    speeds = {row: data.BATCH * data.SEQ_LEN / statistics.median(times) for row, times in seconds.items()}
    one = speeds["one shuffled stream"]
    print(f"batches of {data.BATCH} × {data.SEQ_LEN} tokens, median of {data.RUNS} alternating runs\n")
    for row, speed in speeds.items():
        print(f"{row:28}{speed / 1e6:8,.0f} M tokens/s{speed / one:8.2f}")
    print(packing())


def measure(folder: Path) -> dict[str, list[float]]:
    build = ComponentBuilder(discover())

    def opened(use: dict[str, object]) -> SampleStream:
        chosen = build.resolve("data_source", use)
        source = build(chosen, seq_len=data.SEQ_LEN, split="train", seed=0, samples_per_step=data.BATCH)
        return SampleStream(source, 0, True)

    files = [{"name": "token_files", "path": str(folder / str(number))} for number in range(len(SHARES))]
    sources = [
        {"name": f"s{number}", "weight": share, "source": source}
        for number, (share, source) in enumerate(zip(SHARES, files, strict=True))
    ]
    streams = {
        "one shuffled stream": opened({"name": "token_files", "path": [str(source["path"]) for source in files]}),
        "mixture of four sources": opened({"name": "mixture", "sources": sources}),
    }
    batches = {row: data.shuffled(stream) for row, stream in streams.items()}
    seconds: dict[str, list[float]] = {row: [] for row in streams}
    for _ in range(data.RUNS):
        for row, each in batches.items():
            seconds[row].append(data.timed(lambda each=each: next(each)))
    return seconds


def packing() -> str:
    """Opening a source, documents found and packed, of the standard library four times over."""
    files = [file for file in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "-packages" not in str(file)]
    texts = [np.frombuffer(file.read_bytes() + b"\xff", dtype=np.uint8) for file in sorted(files)]
    tokens = np.tile(np.concatenate(texts).astype(np.uint16), 4)
    facts = TokenFacts(seq_len=2048, vocab_size=256, tokenizer=None, separator=255, identity=[])
    made: list[PackedDocuments] = []

    def open_source() -> None:
        made[:] = [PackedDocuments([find_documents(tokens, 255)], facts, end_of_document=255)]

    seconds = statistics.median(data.timed(open_source) for _ in range(5))
    what = f"{len(tokens) / 1e6:,.0f} M tokens in {4 * len(texts):,} documents"
    speed = f"{len(tokens) / seconds / 1e6:,.0f} M tokens/s"
    return f"\nbest fit: {what}, {speed}, {1 - made[0].filled:.2%} of the positions empty"


if __name__ == "__main__":
    main()
