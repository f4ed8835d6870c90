"""Text to train a language model on, with nothing to download.

    corpus = build(read_python_docs(), cache=Path("results/corpus"))

Documents come from the running Python itself (`read_python_docs`) or from a folder (`read_folder`).
They are deduplicated and split by document, so that no text is in both splits; a byte-level BPE is
trained on the training split, and the tokens are cached under the digest of all they depend on.
Printed beside a result, the digest says which text the result belongs to: the documentation differs
from one Python build to the next.
"""

import ast
import hashlib
import json
import os
import socket
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

VOCABULARY = 2048
VALIDATION_FRACTION = 0.05
END_OF_DOCUMENT = "<|end|>"
PATTERNS = ("*.txt", "*.md", "*.py")
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LONGEST_DOCUMENT = 8192  # characters; a longer file is cut, so that a single book can be split too
FORMAT = 1  # of the cache; part of the digest


class CorpusError(ValueError):
    """The source has no text, or too little of it."""


@dataclass(frozen=True)
class Corpus:
    """Two token streams; every document ends with the end-of-document token."""

    train: npt.NDArray[np.uint16]
    validation: npt.NDArray[np.uint16]
    vocabulary: int  # number of different tokens, that of the end of a document included
    digest: str  # of documents, split and tokenizer settings


def read_python_docs() -> list[str]:
    """The language reference that `help()` shows, and every docstring of the standard library.

    Sources are parsed, never imported, so that nothing runs and optional modules don't matter.
    """
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not NOT_THE_LIBRARY & set(path.relative_to(library).parts):
            documents += _docstrings(path)
    return documents


def _docstrings(path: Path) -> list[str]:
    """Docstrings of a file in order; none if it is not valid Python (lib2to3 ships such files)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]


def read_folder(folder: Path) -> list[str]:
    """The text files below `folder`, in the order of their paths."""
    if not folder.is_dir():
        raise CorpusError(f"--corpus: {folder} is not a folder")
    paths = sorted({path for pattern in PATTERNS for path in folder.rglob(pattern)})
    if not paths:
        raise CorpusError(f"--corpus: no {', '.join(PATTERNS)} files in {folder}")
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file())
    return [document for text in texts for document in _cut(text)]


def _cut(text: str) -> list[str]:
    """Cuts a text at blank lines into documents up to LONGEST_DOCUMENT characters, if it can."""
    documents = [""]
    for paragraph in text.split("\n\n"):
        if len(documents[-1]) + len(paragraph) > LONGEST_DOCUMENT and documents[-1]:
            documents.append("")
        documents[-1] += paragraph + "\n\n"
    return documents


def split(documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """Training and validation documents, without duplicates.

    Which side a document is on depends on its own hash alone: adding documents never moves one.
    """
    sides: tuple[list[str], list[str]] = ([], [])
    for text in dict.fromkeys(filter(None, (document.strip() for document in documents))):
        position = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        sides[position < VALIDATION_FRACTION].append(text)
    return sides


def build(documents: Sequence[str], cache: Path) -> Corpus:
    """Splits and tokenizes `documents`, or takes from `cache` what an earlier call made of them."""
    train, validation = split(documents)
    if not train or not validation:
        raise CorpusError(
            f"corpus too small: {len(train)} documents to train on, {len(validation)} to validate"
        )
    settings = [FORMAT, VOCABULARY, END_OF_DOCUMENT, train, validation]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    if not (cache / f"{digest}.json").exists():
        _tokenize(train, validation, cache, digest)
    return load(cache, digest)


def load(cache: Path, digest: str) -> Corpus:
    """The corpus that `build` left in `cache`."""
    return Corpus(
        train=np.load(cache / f"{digest}-train.npy"),
        validation=np.load(cache / f"{digest}-validation.npy"),
        vocabulary=json.loads((cache / f"{digest}.json").read_text())["vocabulary"],
        digest=digest,
    )


def _tokenize(train: list[str], validation: list[str], cache: Path, digest: str) -> None:
    """Trains the BPE on the training split; writes three files, the one `build` looks for last."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns about forks
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)

    cache.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    for name, documents in (("train", train), ("validation", validation)):
        encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
        tokens = np.concatenate([np.array([*one.ids, end], dtype=np.uint16) for one in encoded])
        _publish(cache / f"{digest}-{name}.npy", partial(np.save, arr=tokens))
    summary = {
        "vocabulary": tokenizer.get_vocab_size(),
        "documents": {"train": len(train), "validation": len(validation)},
        "tokenizer": json.loads(tokenizer.to_str()),
    }
    _publish(cache / f"{digest}.json", lambda file: file.write(json.dumps(summary).encode()))


def _publish(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """A file is complete or absent, also when two hosts that share a disk build at once."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with temporary.open("wb") as file:
        write(file)
    temporary.replace(path)
