"""Damage: every flipped bit and every truncation of a file is reported, and no wrong number is ever read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from plurax.transforms._files.errors import Damaged
from plurax.transforms.modules import _safetensors, load_params, save_params
from plurax.transforms.modules._safetensors import read_array, reading, write

pytestmark = pytest.mark.smoke

GENERATOR = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "net.kernel": GENERATOR.normal(size=(3, 5)).astype(np.float32),
    "net.bias": GENERATOR.normal(size=3).astype(np.float16),
    'a "name"\x1f of é': np.zeros((0, 3), np.float32),
    "count": np.asarray(7),
    "mask": np.array([True, False]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.safetensors"


@pytest.fixture
def content(path: Path) -> bytes:
    write("save", path, ARRAYS)
    return path.read_bytes()


def read(path: Path) -> dict[str, np.ndarray]:
    with reading("load", path) as file:
        return {name: read_array("load", file, path, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def assert_told(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(
        Damaged, match=r"^load: .*some\.safetensors is damaged: .*; restore a copy, or save it again\.$"
    ):
        read(path)


def test_a_written_file_is_read(path: Path, content: bytes) -> None:
    found = read(path)
    assert found.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(found[name], x)
    assert safetensors.numpy.load_file(path).keys() == ARRAYS.keys()


def test_every_byte_counts(path: Path, content: bytes) -> None:
    for i in range(len(content)):
        changed = bytearray(content)
        changed[i] ^= 1 << (3 * i) % 8
        assert_told(path, bytes(changed))


def test_every_bit_of_the_metadata_counts(path: Path, content: bytes) -> None:
    # The metadata holds the checksums: unnoticed damage to it would leave other data unprotected.
    for i in range(8 * (content.index(b"}") + 3)):
        changed = bytearray(content)
        changed[i // 8] ^= 1 << i % 8
        assert_told(path, bytes(changed))


def test_every_truncation_is_reported(path: Path, content: bytes) -> None:
    for length in range(0, len(content), 3):
        assert_told(path, content[:length])
    assert_told(path, content[:-1])
    assert_told(path, content + b"\0")


def test_swapped_bytes_are_reported(path: Path, content: bytes) -> None:
    assert_told(path, content[:-4] + content[-2:] + content[-4:-2])
    assert_told(path, content[:8] + content[8:].replace(b"net.kernel", b"net.kernal"))


@pytest.mark.parametrize(
    "length", [0, 1, 2**20, 10**8, 10**8 + 1, 2**31, 2**40, 2**63, 2**64 - 1], ids=lambda length: f"{length:.0e}"
)
def test_a_wrong_header_length_is_reported(path: Path, content: bytes, length: int) -> None:
    assert_told(path, length.to_bytes(8, "little") + content[8:])


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 5000,
        b'{"a":' * 500,
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"plurax.checksum":"00000000"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"plurax.format":"1"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\xff\xfe",
        b"",
    ],
)
def test_invalid_headers_are_reported(path: Path, header: bytes) -> None:
    assert_told(path, len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + bytes(100), b"\x80\x02}q\x00." + bytes(100), b"some text\n" * 9]
)
def test_other_files_are_reported(path: Path, content: bytes) -> None:
    assert_told(path, content)


def test_a_file_from_elsewhere_needs_no_checksum(path: Path) -> None:
    for metadata in (None, {}, {"format": "pt"}):
        safetensors.numpy.save_file(ARRAYS, path, metadata)
        np.testing.assert_array_equal(read(path)["net.kernel"], ARRAYS["net.kernel"])
        assert_told(path, path.read_bytes()[:-1])


def test_later_formats_are_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(_safetensors._METADATA, "plurax.format", "2")
        write("save", path, ARRAYS)
        assert read(path)
    with pytest.raises(ValueError, match=r"load: .* has version 2 of the format, but plurax .* reads version 1; use a"):
        read(path)


def test_large_files_are_read_in_pieces(path: Path) -> None:
    write("save", path, {"a": np.arange(2**23 + 5, dtype=np.uint32)})
    assert read(path)["a"][-1] == 2**23 + 4
    with path.open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"\x55")
    with pytest.raises(Damaged, match="its bytes are not those that were saved"):
        read(path)


def test_nothing_is_changed_by_a_damaged_file(path: Path) -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    save_params(path, model)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    before = np.array(model.kernel[...])
    for strict in (True, False):
        with pytest.raises(
            ValueError, match="load_params: .* is damaged: its bytes are not those that were saved; restore"
        ):
            load_params(path, model, strict=strict)
    np.testing.assert_array_equal(model.kernel[...], before)
