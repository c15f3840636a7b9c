"""A page that shows what a model sees of a batch: its images, and its text with what is learned of it.

Shapes: B = batch, S = sequence, N = tiles of a row.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

import attrs
import numpy as np
from PIL import Image

from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_plugins_vlm.contracts.image_processor import NEWLINE
from forge_plugins_vlm.data.document import TEXT

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
.legend span, .text span { padding: .1rem .25rem; border-radius: .25rem; }
.images { display: flex; flex-wrap: wrap; gap: .75rem; } figure { margin: 0; }
figure img { min-width: 96px; max-width: 224px; image-rendering: pixelated; border: 1px solid #bbb; display: block; }
figcaption { font-size: .8rem; color: #555; }
.text { white-space: pre-wrap; border-left: 3px solid #ddd; margin: .75rem 0; padding-left: .75rem; }
.learned { background: #cdeccd; } .image { background: #d6e4fb; } .prompt { background: #eee; }
.note { color: #777; font-size: .85rem; }
"""
_LEGEND = (
    '<p class="legend"><span class="learned">learned</span> <span class="prompt">seen, not learned</span> '
    '<span class="image">positions of images</span></p>'
)


@attrs.frozen
class _Piece:
    """Neighbouring positions of one kind."""

    kind: str
    """``learned``, ``prompt`` or ``image``."""
    words: str


def page_of(
    title: str, facts: Sequence[str], batch: Mapping[str, np.ndarray], tokenizer: Tokenizer, names: Sequence[str] = ()
) -> str:
    """One HTML page with everything in it.

    Args:
        facts: sentences about the batch.
        batch: as the source ``image_text``, or a mixture with it, gives it.
        names: of the sources that the entry ``source`` numbers.
    """
    rows = [{name: values[number] for name, values in batch.items()} for number in range(len(batch["tokens"]))]
    sections = [_section(number, row, tokenizer, names) for number, row in enumerate(rows, 1)]
    said = "".join(f"<p>{escape(fact)}</p>" for fact in facts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>{said}{_LEGEND}\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _section(number: int, row: Mapping[str, np.ndarray], tokenizer: Tokenizer, names: Sequence[str]) -> str:
    source = f" of {names[int(row['source'])]}" if names else ""
    n_tiles = int(row["image_range"][:, 2].max(initial=0))
    figures = "".join(_figure(tile, row) for tile in range(n_tiles))
    learned = int((row["targets"] != IGNORED).sum())
    texts = "".join(
        f'<div class="text">{"".join(_span(piece) for piece in _pieces(row, here, tokenizer))}</div>'
        for here in _documents(row, tokenizer)
    )
    note = f"{learned} targets, {n_tiles} tiles, {len(row['tokens'])} positions"
    return (
        f'<h2>Sample {number}{escape(source)}</h2><p class="note">{note}</p><div class="images">{figures}</div>{texts}'
    )


def _figure(tile: int, row: Mapping[str, np.ndarray]) -> str:
    pixels = row["pixels"][tile].transpose(1, 2, 0)
    if "pixels_sizes" in row:
        height, width = row["pixels_sizes"].tolist()
        pixels = pixels[:height, :width]
    if "tile_sizes" in row:
        height, width = row["tile_sizes"][tile].tolist()
        pixels = pixels[:height, :width]
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
    content = base64.b64encode(stream.getvalue()).decode()
    size = f"{pixels.shape[0]} × {pixels.shape[1]}"
    return (
        f'<figure><img alt="tile {tile}" src="data:image/png;base64,{content}">'
        f"<figcaption>tile {tile}, {size}</figcaption></figure>"
    )


def _documents(row: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The positions of each document of a row, without the padding behind the last."""
    learned = np.flatnonzero(row["targets"] != IGNORED)
    stop = min(len(row["tokens"]), int(learned[-1]) + 2) if len(learned) else _without_padding(row, tokenizer)
    document = row.get("document", np.zeros_like(row["tokens"]))[:stop]
    for number in dict.fromkeys(document.tolist()):
        yield np.flatnonzero(document == number)


def _without_padding(row: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> int:
    """Where the last token of a row without targets ends."""
    used = (row["tokens"] != tokenizer.end_of_document) | (row["image_slots"] != TEXT)
    return int(np.flatnonzero(used)[-1]) + 1 if used.any() else 0


def _pieces(row: Mapping[str, np.ndarray], here: np.ndarray, tokenizer: Tokenizer) -> Iterator[_Piece]:
    """The text of a document, in order."""
    kinds = [_kind(row, at, is_first=at == here[0]) for at in here.tolist()]
    for kind, group in groupby(zip(kinds, here.tolist(), strict=True), key=lambda one: one[0]):
        places = [at for _, at in group]
        if kind == "image":
            yield _Piece(kind, _image_words(row["image_slots"][places], row["image_range"][places]))
        else:
            yield _Piece(kind, _words(row["tokens"][places].tolist(), tokenizer))
    last = int(here[-1])
    if last + 1 == len(row["tokens"]) and row["targets"][last] != IGNORED:  # a target alone
        yield _Piece("learned", _words([int(row["targets"][last])], tokenizer))


def _kind(row: Mapping[str, np.ndarray], at: int, *, is_first: bool) -> str:
    ends = row["image_range"][:, 2]
    begins = ends[at] > (row["image_range"][at, 0] if is_first else ends[at - 1])
    if row["image_slots"][at] != TEXT or begins:
        return "image"
    return "prompt" if is_first or row["targets"][at - 1] == IGNORED else "learned"


def _image_words(slots: np.ndarray, ranges: np.ndarray) -> str:
    """Neighbouring positions of images in words."""
    _, first, stop = ranges[-1].tolist()  # neighbours are the latest images together
    tiles = f"tile {first}" if stop == first + 1 else f"tiles {first} to {stop - 1}"
    rows = f", of which {int((slots == NEWLINE).sum())} end a row" if (slots == NEWLINE).any() else ""
    count = f"{len(slots)} position{'s' * (len(slots) > 1)}{rows}"
    return f"[{tiles}: {count}]"


def _words(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text with its ends of documents, which decode to nothing."""
    words = []
    for is_end, group in groupby(ids, key=lambda one: one == tokenizer.end_of_document):
        own = [*group]
        words.append("⟨end⟩" * len(own) if is_end else tokenizer.decode(own))
    return " ".join(words)


def _span(piece: _Piece) -> str:
    return f'<span class="{piece.kind}">{escape(piece.words)}</span> '
