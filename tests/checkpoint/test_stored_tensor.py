"""What a rank needs of a stored tensor is read from its record, and hardly more."""

import io
import os
import zipfile
from types import SimpleNamespace

import pytest
import torch

from forge_core.checkpoint.manifest import DamagedError
from forge_core.checkpoint.stored_tensor import read_part

DESCRIPTION = 12_000
"""Bytes of a record that are read beside its values, at most."""


class Counted:
    """``os.preadv``, counted, and limited as the system limits it, to nearly 2 GiB a call."""

    def __init__(self):
        self.n_bytes = self.calls = 0
        self.most = 1 << 31

    def __call__(self, file, buffers, offset):
        (buffer,) = buffers
        n = PREADV(file, [memoryview(buffer)[: self.most]], offset)
        self.n_bytes += n
        self.calls += 1
        return n


PREADV = os.preadv


@pytest.fixture
def counted(monkeypatch):
    reads = Counted()
    monkeypatch.setattr("forge_core.checkpoint.stored_tensor.os.preadv", reads)
    return reads


@pytest.fixture
def stored(tmp_path):
    """A function that stores a tensor, or a record's bytes, among others; it returns the file and the place."""
    files = []

    def store(content):
        if isinstance(content, torch.Tensor):
            written = io.BytesIO()
            torch.save(content, written)
            content = written.getvalue()
        before, after = b"PK\x05\x06" * 25, b"PK\x05\x06" * 100
        path = tmp_path / "__0_0.distcp"
        path.write_bytes(before + content + after)
        files.append(path.open("rb"))
        return files[-1].fileno(), SimpleNamespace(relative_path=path.name, offset=len(before), length=len(content))

    yield store
    for file in files:
        file.close()


def part(tensor, begin, shape):
    return tensor[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]


def read(stored, tensor, begin, shape, described=None):
    file, place = stored(tensor)
    described = tensor if described is None else described
    target = torch.full(shape, 1, dtype=described.dtype)
    read_part(file, place, described.to("meta"), begin, target)
    return target


def same_bits(one, other):
    as_bytes = [tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize(
    ("begin", "shape"),
    [
        ((0, 0, 0), (5, 7, 900)),  # all of it
        ((2, 0, 0), (3, 7, 900)),  # one stretch
        ((1, 3, 0), (3, 2, 900)),  # stretches
        ((1, 3, 450), (3, 2, 450)),  # close together
        ((4, 6, 899), (1, 1, 1)),
        ((2, 0, 10), (0, 7, 20)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_part_is_the_same_to_the_bit(stored, dtype, begin, shape):
    torch.manual_seed(0)
    tensor = torch.randn(5, 7, 900).to(dtype)

    got = read(stored, tensor, begin, shape)

    assert same_bits(got, part(tensor, begin, shape))


@pytest.mark.parametrize(
    ("tensor", "begin", "shape"),
    [
        (torch.randn(900, 40).t(), (3, 100), (20, 500)),
        (torch.randn(9000, dtype=torch.complex64).conj(), (3,), (80,)),
        (torch.randn(10_000)[10:9000], (5,), (70,)),
        (torch.nn.Parameter(torch.randn(9)).detach(), (0,), (9,)),
        (torch.tensor(3.5), (), ()),
        (torch.zeros(0, 4), (0, 0), (0, 4)),
    ],
    ids=["columns first", "conjugated", "of a larger one", "parameter", "one number", "nothing"],
)
def test_tensors_that_lie_otherwise_are_read_too(stored, tensor, begin, shape):
    got = read(stored, tensor, begin, shape)

    assert same_bits(got, part(tensor, begin, shape) if shape else tensor)


@pytest.mark.parametrize(
    ("begin", "shape", "calls"),
    [
        ((100, 0), (28, 8192), 1),  # a part of the first dimension, as of fsdp
        ((0, 4096), (256, 1024), 256),  # of the second, as of tensor parallelism
        ((255, 8191), (1, 1), 1),
    ],
)
def test_no_more_is_read_than_is_needed(stored, counted, begin, shape, calls):
    tensor = torch.randn(256, 8192)

    got = read(stored, tensor, begin, shape)

    assert same_bits(got, part(tensor, begin, shape))
    assert counted.n_bytes <= 1.1 * got.nbytes + DESCRIPTION
    assert counted.calls <= calls + 60


def test_a_small_record_is_read_in_one_go(stored, counted):
    tensor = torch.randn(8, 100)

    assert same_bits(read(stored, tensor, (2, 50), (6, 20)), tensor[2:, 50:70])
    assert counted.calls == 1


def test_parts_within_a_page_are_read_with_what_lies_between_them_not_one_by_one(stored, counted):
    tensor = torch.randn(3, 2000, 20)

    got = read(stored, tensor, (1, 0, 5), (2, 2000, 4))

    assert same_bits(got, part(tensor, (1, 0, 5), (2, 2000, 4)))
    assert counted.calls < 60
    assert counted.n_bytes <= tensor[1:].nbytes + DESCRIPTION


def test_reads_that_come_short_go_on(stored, counted):
    counted.most = 1000
    tensor = torch.randn(10, 1200)

    assert same_bits(read(stored, tensor, (1, 0), (8, 1200)), tensor[1:9])
    assert counted.calls > 39


def test_a_target_that_is_not_contiguous_is_filled(stored):
    tensor, target = torch.randn(600, 8), torch.zeros(9, 8)
    file, place = stored(tensor)

    read_part(file, place, tensor.to("meta"), (1, 2), target[::2, 1:4][:4])

    assert torch.equal(target[:7:2, 1:4], tensor[1:5, 2:5])
    assert target[1::2].count_nonzero() == 0


@pytest.mark.parametrize(
    "described", [torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4)], ids=["dtype", "shape"]
)
def test_a_tensor_that_is_not_the_one_described_is_refused(stored, described):
    kind = str(described.dtype).removeprefix("torch.")
    said = rf"__0_0.distcp has a tensor float32 \(4, 6\), described as {kind} \({described.shape[0]}, "

    with pytest.raises(DamagedError, match=said):
        read(stored, torch.ones(4, 6), (0, 0), (1, 1), described)


def rewritten(tensor, change, kind=zipfile.ZIP_STORED):
    """The record of a tensor, as an older torch writes it, with ``change`` made to each of its members."""
    written, record = io.BytesIO(), io.BytesIO()
    torch.save(tensor, written)
    with zipfile.ZipFile(written) as old, zipfile.ZipFile(record, "w", kind) as new:
        for name in old.namelist():
            if name == "archive/.format_version":
                continue
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
    return record.getvalue()


def read_record(stored, record, like):
    file, place = stored(record)
    target = torch.zeros(like.shape[0] - 1, *like.shape[1:])
    read_part(file, place, like.to("meta"), (1,) + (0,) * (like.dim() - 1), target)
    return target


def test_values_of_a_machine_with_the_other_byte_order_are_turned_round(stored):
    tensor = torch.randn(5000, 3)
    others = {"byteorder": b"big", "data/0": tensor.numpy().byteswap().tobytes()}
    record = rewritten(tensor, lambda name, old: others.get(name, old))

    assert torch.equal(read_record(stored, record, tensor), tensor[1:])


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(5000, 3), torch.randint(256, (5000, 12), dtype=torch.uint8).view(torch.float32)],
    ids=["to less", "to no less"],
)
def test_a_compressed_record_is_refused(stored, tensor):
    with pytest.raises(DamagedError, match=r"__0_0.distcp has a compressed record"):
        read_record(stored, rewritten(tensor, lambda _, old: old, zipfile.ZIP_DEFLATED), tensor)


def test_a_record_with_fewer_values_than_it_says_gives_nothing_of_what_lies_behind_it(stored):
    tensor = torch.zeros(5000, 3)
    record = rewritten(tensor, lambda name, old: old[:40_000] if name == "data/0" else old)

    with pytest.raises(RuntimeError, match=r"record size \(40000 bytes\) does not match expected size"):
        read_record(stored, record, tensor)


def test_a_record_of_several_storages_is_read_as_torch_reads_it(stored):
    """It says that its tensor is the second one."""
    tensor = torch.randn(5000, 3)
    record = rewritten(tensor, lambda name, old: old.replace(b"X\x01\0\0\x000", b"X\x01\0\0\x001"))
    record = io.BytesIO(record)
    with zipfile.ZipFile(record, "a") as archive:
        archive.writestr("archive/data/1", (tensor + 1).numpy().tobytes())

    assert torch.equal(read_record(stored, record.getvalue(), tensor), tensor[1:] + 1)


def test_a_file_that_has_become_shorter_is_named(stored, counted, monkeypatch):
    tensor = torch.randn(5000, 3)
    file, place = stored(tensor)
    monkeypatch.setattr(
        "forge_core.checkpoint.stored_tensor._is_in_order", lambda *_: setattr(counted, "most", 0) or True
    )

    with pytest.raises(DamagedError, match=r"__0_0.distcp ends within a tensor"):
        read_part(file, place, tensor.to("meta"), (1, 0), torch.zeros(4000, 3))


def test_nothing_that_lies_behind_a_record_is_read(stored, monkeypatch):
    """As if its archive said that values begin near its end."""
    tensor = torch.randn(5000, 3)
    file, place = stored(tensor)
    monkeypatch.setattr("forge_core.checkpoint.stored_tensor._first_byte", lambda _: place.length - 100)
    monkeypatch.setattr("forge_core.checkpoint.stored_tensor._is_in_order", lambda *_: True)
    target = torch.zeros(20, 3)

    with pytest.raises(DamagedError, match=r"__0_0.distcp ends within a tensor"):
        read_part(file, place, tensor.to("meta"), (0, 0), target)

    assert target.count_nonzero() == 0
