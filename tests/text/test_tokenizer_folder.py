"""Loading a tokenizer from a checkpoint folder, and the form of a token in the API."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moe_serve.errors import CheckpointError
from moe_serve.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.enable_truncation(4)  # files of published models carry such left-overs
    backend.enable_padding(length=12)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_encoding_follows_the_post_processor(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("hello world")
    assert ids[0] == 256
    assert tokenizer.encode("hello world", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello world"
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_encoding_equals_transformers(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = Tokenizer.load(folder)
    for text in ("", "a", "Grüße 🎉\n\n\tx", "<s>in the text</s>"):
        for adds in (True, False):
            ours = tokenizer.encode(text, add_special_tokens=adds)
            assert ours == reference.encode(text, add_special_tokens=adds), text
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, None, (257,)),
    ],
)
def test_end_of_text_ids(
    folder: Path,
    generation_config: dict[str, object] | None,
    config: dict[str, object] | None,
    expected: tuple[int, ...],
) -> None:
    for name, content in (("generation_config", generation_config), ("config", config)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer.load(folder).eos_token_ids == expected


def test_token_text_and_bytes(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.token_bytes(first) + tokenizer.token_bytes(second) == "é".encode()
    assert tokenizer.token_text(first) == "bytes:\\xc3"
    assert tokenizer.token_text(tokenizer.encode(" ")[1]) == " "
    assert tokenizer.token_text(257) == "</s>"


def test_bad_folders_name_the_file(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing/tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path / "missing")
    (folder / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id must be token ids"):
        Tokenizer.load(folder)
    for text in ("{", "[" * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
            Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(folder)


def test_long_texts_give_the_same_tokens(folder: Path) -> None:
    """Long texts use another function of the library, which releases the interpreter."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    tokenizer = Tokenizer.load(folder)
    text = "Grüße 🎉 </s>\n\n the end. " * 500
    for adds in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=adds)
        assert ids == backend.encode(text, add_special_tokens=adds).ids
        for skips in (True, False):
            decoded = tokenizer.decode(ids, skip_special_tokens=skips)
            assert decoded == backend.decode(ids, skip_special_tokens=skips)


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    """Other threads once stood still. Turns are counted, not timed: with the interpreter held there
    are 1 or 2."""
    tokenizer = Tokenizer.load(folder)
    num_turns, is_over = 0, threading.Event()

    def turn() -> None:
        nonlocal num_turns
        while not is_over.wait(0.001):
            num_turns += 1

    thread = threading.Thread(target=turn)
    thread.start()
    tokenizer.encode("a b " * 250_000)
    is_over.set()
    thread.join()
    assert num_turns >= 10
