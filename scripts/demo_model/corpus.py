"""Reads the training text: eight domains of documents, some of them also as chats.

A document is a string; a chat is a list of (user, assistant) turns. The tokenizer of the model is
a byte-level BPE.
"""

from __future__ import annotations

import lzma
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
DOMAINS = (
    "stories",
    "encyclopedia",
    "instruct",
    "math",
    "code_python",
    "code_c",
    "french",
    "german_law",
)
END_OF_TEXT = "<|endoftext|>"

Turns = list[tuple[str, str]]

_INSTRUCT = re.compile(r"### Instruction:\n(.*?)\n+### Response:\n(.*)", re.S)
_QUESTION = re.compile(r"Question: (.*?)\nAnswer: (.*)", re.S)
_DRILL = re.compile(r"Q: (.*?)\nA: (.*?)(?=\n\nQ: |\Z)", re.S)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Trains BPE over bytes (every digit its own token) and saves it to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of one split, by domain."""

    documents: dict[str, list[str]]

    @classmethod
    def read(cls, root: Path, split: str) -> Corpus:
        """Reads `root/<domain>/<split>.txt.xz`; documents end with a line `<|endoftext|>`."""
        documents = {}
        for domain in DOMAINS:
            with lzma.open(root / domain / f"{split}.txt.xz", "rt", encoding="utf-8") as file:
                pieces = file.read().split(END_OF_TEXT)
            documents[domain] = [p.lstrip("\n") for p in pieces if p.strip()]
        return cls(documents)


def chats_of(document: str) -> list[Turns]:
    """Returns the conversations in a document; none if it has no questions and answers.

    Drills (`Q:`/`A:` lines) become conversations of up to three turns.
    """
    if match := _INSTRUCT.search(document):
        user = match[1].replace("### Input:\n", "").strip()
        return [[(user, match[2].strip())]]
    if match := _QUESTION.search(document):
        return [[(match[1].strip(), match[2].strip())]]
    drills = [(q.strip(), a.strip()) for q, a in _DRILL.findall(document)]
    return [drills[i : i + 3] for i in range(0, len(drills), 3)]


def render_chat(turns: Turns) -> str:
    """Renders a chat as `chat_template.jinja` does, with every turn closed."""
    return "".join(
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for user, answer in turns
    )


def chat_tuning_texts(corpus: Corpus, rng: random.Random) -> list[str]:
    """Returns the texts of the last phase: all chats of sentences, few drills, and an equal amount
    of plain text."""
    chats: list[str] = []
    drills: list[str] = []
    for document in corpus.documents["instruct"] + corpus.documents["math"]:
        kind = drills if document.startswith("Q: ") else chats
        kind += [render_chat(turns) for turns in chats_of(document)]
    chats += rng.sample(drills, min(len(drills), len(chats) // 8))
    plain = [text for domain in DOMAINS for text in corpus.documents[domain]]
    rng.shuffle(plain)
    room = sum(map(len, chats))
    for text in plain:
        if room <= 0:
            break
        chats.append(text)
        room -= len(text)
    rng.shuffle(chats)
    return chats


def training_texts(corpus: Corpus, rng: random.Random) -> list[str]:
    """Returns every document once unchanged, and instruct and half of math once more in chat
    form."""
    texts = [text for domain in DOMAINS for text in corpus.documents[domain]]
    for document in corpus.documents["instruct"]:
        texts += [render_chat(turns) for turns in chats_of(document)]
    for document in corpus.documents["math"]:
        texts += [render_chat(turns) for turns in chats_of(document) if rng.random() < 0.5]
    rng.shuffle(texts)
    return texts
