"""Foreign .pt files: plain data is read, and anything executable is refused by its name.

The files under data/ were written by torch.save; the others are made here, opcode by opcode.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_predictor.torch_files.opcodes import read_plain_data
from routing_predictor.torch_files.torch_file import read_torch_file
from routing_predictor.traces.routing_error import TraceError

DATA = Path(__file__).parent / "data"


def test_what_torch_saves_is_read() -> None:
    found = read_torch_file(DATA / "sglang_stat.pt")
    expected = np.arange(72, dtype=np.int32).reshape(3, 4, 6)
    expected[:, 0] = 0
    assert found["rank"] == 0 and found["average_utilization_rate_over_window"] == 0.75
    assert found["logical_count"].dtype == np.int32
    assert np.array_equal(found["logical_count"], expected)


def torch_zip(path: Path, description: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x/data.pkl", description)
        archive.writestr("x/data/0", np.arange(6, dtype="<i4").tobytes())
    return path


def text(word: str) -> bytes:
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


def tensor(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    offset: int = 0,
    stored: int = 6,
    key: str = "0",
    kind: str = "IntStorage",
) -> bytes:
    """Returns a tensor as torch.save describes it."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"J" + v.to_bytes(4, "little", signed=True) for v in values) + b"t"

    storage = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key)
    storage += text("cpu") + b"J" + stored.to_bytes(4, "little") + b"tQ"
    ordered = b"ccollections\nOrderedDict\n)R"
    parts = storage + b"J" + offset.to_bytes(4, "little") + numbers(shape) + numbers(strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + parts + b"\x89" + ordered + b"tR"


def test_views_of_a_storage(tmp_path: Path) -> None:
    for shape, strides, offset, expected in (
        ((2, 3), (3, 1), 0, [[0, 1, 2], [3, 4, 5]]),
        ((3, 2), (1, 3), 0, [[0, 3], [1, 4], [2, 5]]),
        ((2,), (2,), 1, [1, 3]),
        ((), (), 4, 4),
        ((0, 7), (7, 1), 0, np.zeros((0, 7)).tolist()),
    ):
        pickle = b"\x80\x02" + tensor(shape, strides, offset=offset) + b"."
        found = read_torch_file(torch_zip(tmp_path / "a.pt", pickle))
        assert found.tolist() == expected


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (tensor((7,), (1,)), r"a tensor of \(7,\) reaches beyond its storage"),
        (tensor((2,), (9,)), "reaches beyond its storage"),
        (tensor((1000, 1000), (0, 0)), "reaches beyond its storage"),
        (tensor((2,), (1,), stored=5), "storage 0 has 24 bytes, which do not fit 5 values"),
        (tensor((2,), (1,), key="../0"), "does not contain"),
        (tensor((2,), (-1,)), "describes a tensor that cannot be one"),
        (tensor((2, 2), (1,)), "describes a tensor that cannot be one"),
        (tensor((2,), (1,), kind="BFloat16Storage"), "a tensor of BFloat16Storage"),
    ],
)
def test_impossible_tensors(tmp_path: Path, made: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_torch_file(torch_zip(tmp_path / "a.pt", b"\x80\x02" + made + b"."))


EVIL = [
    (b"cos\nsystem\n(" + b"S'touch %s'\n" + b"tR.", "it names os.system"),
    (b"\x80\x02cposix\nsystem\n(" + text("touch %s") + b"tR.", "it names posix.system"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "it names os.system"),
    (b"cbuiltins\neval\n(" + text("open('%s','w')") + b"tR.", "it names builtins.eval"),
    (b"c__main__\nX\n)\x81.", "it names __main__.X"),
    (b"(ios\nsystem\n.", "uses INST"),
    (b"ccollections\nOrderedDict\n)R}b.", "uses BUILD"),
    (b"ccollections\nOrderedDict\n)\x81.", "uses NEWOBJ"),
    (b"ccollections\nOrderedDict\n(" + b"K\x01tR.", "it calls collections.OrderedDict with 1"),
    (b"ctorch\nload\n.", "it names torch.load"),
    (b"\x82\x01.", "uses EXT1"),
    (text("os") + b"Q.", "refers to something outside"),
    (b"K\x01K\x02\x85R.", "calls something that is not a name"),
    (b"ctorch\nIntStorage\n.", "it contains only a Name"),
]


@pytest.mark.parametrize(("pickle", "message"), EVIL)
def test_what_would_run_is_refused(tmp_path: Path, pickle: bytes, message: str) -> None:
    mark = tmp_path / "it ran"
    pickle = pickle.replace(b"%s", str(mark).encode())
    with pytest.raises(TraceError, match=message):
        read_torch_file(torch_zip(tmp_path / "a.pt", pickle))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("pickle", "message"),
    [
        (b"", "damaged|no end"),
        (b"K\x01", "no end|damaged"),
        (b"K\x01K\x02.", "must end with one value, but ends with 2"),
        (b".", "must end with one value, but ends with 0"),
        (b"h\x05.", "damaged"),
        (b"\x85.", "a tuple of too few"),
        (b"K\x01a.", "damaged"),
        (b"t.", "no mark"),
        (b"}(K\x01u.", "a key without a value"),
        (b"})K\x01s.", "a key of a dict is tuple"),
        (b"]" + b"]" * 40 + b"a" * 40 + b".", "more than 32 deep"),
        (b"]q\x00h\x00a.", "more than 32 deep"),
        (b"]q\x00h\x00h\x00\x93.", "a name that is not text"),
        (tensor((2**31 - 1,) * 9, (1,) * 9), "cannot be one"),
        (b"c\x1b[2J\nX\n.", r"it names \?\[2J.X"),
    ],
)
def test_damage_is_said(tmp_path: Path, pickle: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_torch_file(torch_zip(tmp_path / "a.pt", pickle))


def test_what_is_no_zip(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(TraceError, match="does not exist"):
        read_torch_file(path)
    path.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")  # before torch 1.6
    with pytest.raises(TraceError, match="is not a zip"):
        read_torch_file(path)
    with pytest.raises(TraceError, match="is compressed"):
        read_torch_file(torch_zip(path, b"K\x01.", zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/other", b"")
    with pytest.raises(TraceError, match="must have one description .data.pkl., but has 0"):
        read_torch_file(path)


def test_a_small_file_never_becomes_large(tmp_path: Path) -> None:
    pairs = b"(K\x01K\x02lq\x00"  # each list holds the one before it twice
    pairs += b"".join(b"(h%ch%clq%c" % (i, i, i + 1) for i in range(28))
    with pytest.raises(TraceError, match="refer to each other too often"):
        read_torch_file(torch_zip(tmp_path / "a.pt", b"(" + pairs + b"l."))
    storage = np.zeros(2**18, dtype="<i4").tobytes()
    views = b"".join(tensor((2**17,), (1,), stored=2**18, offset=i) for i in range(16))
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"(" + views + b"l.")
        archive.writestr("x/data/0", storage)
    with pytest.raises(TraceError, match="share storage too often"):
        read_torch_file(tmp_path / "b.pt")


def test_a_zip_with_damaged_names(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ä/data.pkl", b"K\x01.")
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xff"))
    with pytest.raises(TraceError, match="cannot be read"):
        read_torch_file(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_bytes_are_data_or_a_sentence(data: st.DataObject) -> None:
    """A real pickle with any changed bytes is read or refused."""
    with zipfile.ZipFile(DATA / "sglang_per_token.pt") as archive:
        content = bytearray(archive.read("sglang_per_token/data.pkl"))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    try:
        read_plain_data(bytes(content))
    except TraceError as error:
        assert str(error)
