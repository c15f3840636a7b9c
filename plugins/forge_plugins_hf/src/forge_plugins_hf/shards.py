"""Files of safetensors, read and written a tensor at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from forge_core.checkpoint.fsync import open_large
from forge_core.errors import ConfigError, and_more

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "consolidated*.pth", "*.ckpt")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_MOST_BYTES = 5 * 10**9
"""Of a file that is written, as Hugging Face has it."""


@attrs.frozen
class _Stored:
    """A tensor in a file."""

    file: Path
    shape: torch.Size
    dtype: str
    """As the header of the file calls it."""
    start: int
    """The byte of the file that is its first."""


class Shards:
    """The weights in a folder.

    Raises:
        ConfigError: there are none, a file is missing or cut off, or tensors are not where the index says.
    """

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, _Stored] = {}
        index = _index(folder)
        files = sorted({folder / name for name in index.values()}) if index else [folder / SINGLE]
        for file in files:
            with _opened(file) as shard:
                starts = _starts(file)
                for name in shard.keys():  # noqa: SIM118 - it is no mapping
                    one = shard.get_slice(name)
                    self._stored[name] = _Stored(file, torch.Size(one.get_shape()), one.get_dtype(), starts[name])
        wrong = [name for name, file in index.items() if name not in self._stored]
        wrong += [name for name, one in self._stored.items() if index and folder / index.get(name, "") != one.file]
        if wrong:
            named = ", ".join(wrong[:5]) + and_more(len(wrong), 5)
            raise ConfigError(f"{folder / INDEX} and its files do not agree about {named}")

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._stored)

    def shape(self, name: str) -> torch.Size:
        """Of a tensor."""
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        """Of a tensor, as the format of safetensors calls it, such as ``F32`` or ``F8_E4M3``."""
        return self._stored[name].dtype

    def read(self, name: str, part: Sequence[slice] | None = None) -> torch.Tensor:
        """A tensor, or a part of it, on the CPU. The file is opened anew, so that no more of it stays in memory.

        Raises:
            ConfigError: the file is shorter than when it was opened.
        """
        file, start = self._stored[name].file, self._stored[name].start
        with _opened(file) as shard:
            if part:
                partial: torch.Tensor = shard.get_slice(name)[tuple(part)]
                return partial
            mapped = shard.get_tensor(name)
        # a mapped file costs a page fault for every few KiB, several times the reading itself
        tensor = torch.empty(mapped.shape, dtype=mapped.dtype)
        with file.open("rb") as content:
            content.seek(start)
            n_bytes = content.readinto(_bytes_of(tensor))
        if n_bytes != tensor.nbytes:
            raise ConfigError(f"{file} has become shorter since it was opened; download it again")
        return tensor


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ConfigError(f"{file} is not there; the model's download is not complete") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; it may be cut off, download it again") from error


def _starts(file: Path) -> dict[str, int]:
    """Where the bytes of each tensor begin, in a file that the library has found to be whole: it does not say."""
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header = json.loads(content.read(length))
    return {name: 8 + length + one["data_offsets"][0] for name, one in header.items() if name != "__metadata__"}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty if there is a single one."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise ConfigError(_why_none(folder))
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not an index of weights: {error}") from error
    outside = [file for file in index.values() if Path(file).name != file]
    if outside or not index:
        raise ConfigError(f"{path} names {outside[0] if outside else 'no file'}; files must be in the same folder")
    return index


def _why_none(folder: Path) -> str:
    if are_pickled(file.name for file in folder.iterdir()):
        return why_not_pickled(str(folder))
    return f"{folder} has neither {SINGLE} nor {INDEX}; give the folder of a downloaded model"


def are_pickled(names: Iterable[str]) -> bool:
    """Return whether there are pickled weights among files."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in _PICKLED)


def why_not_pickled(source: str) -> str:
    """A sentence about a folder, or a name of the Hub, that has no other weights."""
    return (
        f"{source} has pickled weights, which can run code when they are read. Make safetensors of them with "
        f"transformers: AutoModelForCausalLM.from_pretrained({source!r}).save_pretrained(out)"
    )


@attrs.frozen
class Described:
    """A tensor to be written."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def write_shards(
    folder: Path, tensors: Sequence[Described], make: Callable[[str], torch.Tensor], most_bytes: int = _MOST_BYTES
) -> None:
    """Write files, and an index if there are several. Three tensors are in memory at most.

    Args:
        make: gives the tensor of a name, on the CPU. It is called in a thread of its own.
        most_bytes: of a file; a larger tensor has one of its own.

    Raises:
        ConfigError: a finite value is none in fp16.
    """
    shards = [*_dealt(tensors, most_bytes)]
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, shard, make)
        where |= dict.fromkeys((one.name for one in shard), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(one.n_bytes for one in tensors)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _dealt(tensors: Sequence[Described], most_bytes: int) -> Iterator[list[Described]]:
    shard: list[Described] = []
    for one in tensors:
        if shard and sum(before.n_bytes for before in shard) + one.n_bytes > most_bytes:
            yield shard
            shard = []
        shard.append(one)
    yield shard


def write_safetensors(path: Path, tensors: Sequence[Described], make: Callable[[str], torch.Tensor]) -> None:
    """The format of safetensors, which its library writes only from memory: a length, a header in JSON, and bytes. Each
    tensor is made while the one before is written, and flushed while the next is."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for one in tensors:
        end = start + one.n_bytes
        header[one.name] = {"dtype": _DTYPES[one.dtype], "shape": [*one.shape], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open_large(path) as file, ThreadPoolExecutor(1, "forge-flush") as beside:
        file.write(struct.pack("<Q", len(text)) + text)
        flushes = []
        for tensor in _made_ahead(tensors, make):
            file.write(_bytes_of(tensor))
            file.flush()
            flushes.append(beside.submit(os.fsync, file.fileno()))
        for flush in flushes:
            flush.result()


def _made_ahead(tensors: Sequence[Described], make: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors in order, each begun when the one before is given out."""

    def made(one: Described) -> torch.Tensor:
        whole = make(one.name)
        tensor = whole.to(one.dtype).contiguous()
        assert tensor.shape == one.shape, f"{one.name} is not what was described"
        if one.dtype == torch.float16 and bool((tensor.isinf() & whole.isfinite()).any()):
            raise ConfigError(
                f"{one.name} has values beyond 65,504, the largest of fp16; write the model in bf16 or fp32"
            )
        return tensor

    with ThreadPoolExecutor(1, "forge-make") as beside:
        following = beside.submit(made, tensors[0])
        for one in tensors[1:]:
            tensor, following = following.result(), beside.submit(made, one)
            yield tensor
        yield following.result()


def on_meta(shapes: Mapping[str, torch.Size], names: Sequence[str]) -> list[torch.Tensor]:
    """Tensors without values."""
    return [torch.empty(shapes[name], device="meta") for name in names]
