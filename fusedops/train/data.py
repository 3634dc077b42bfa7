"""Real text as bytes: what to read, how it is split, and which windows each step sees."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 0.05
# Parts of a Python installation that are not its own library, or that mostly repeat it.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(ValueError):
    """The text cannot be trained on; the message names the path and what was wrong."""


@dataclass(frozen=True)
class Corpus:
    """Bytes (uint8, 1-D, on the CPU) to train on and to validate on, with a name and a SHA-256 of both."""

    name: str
    train: Tensor
    validation: Tensor
    sha256: str


def load_corpus(path: str | Path | None, seq: int) -> Corpus:
    """Read a file or a folder of text; without a path, the source of this Python's standard library.

    The last 5 % of every file are kept for validation.

    Args:
        path: file, folder (read whole, in sorted order, binary and hidden files left out), or None.
        seq: tokens a window; both splits must hold at least one window and its next token.

    Raises:
        DataError: the path is missing, unreadable, holds no text, or too little of it for `seq`.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name, files = f"Python's standard library ({root})", list(_stdlib_files(root))
    else:
        root = Path(path)
        name, files = str(root), _user_files(root)

    train, validation = [], []
    for file in files:
        data = _read(file)
        if root.is_dir() and b"\0" in data[:8192]:
            continue
        cut = len(data) - int(len(data) * VALIDATION_SHARE)
        train.append(data[:cut])
        validation.append(data[cut:])
    splits = {"train": b"".join(train), "validation": b"".join(validation)}

    if not splits["train"]:
        raise DataError(f"data: no text in {name} ({len(files)} files looked at); give a text file or a folder of them")
    for split, data in splits.items():
        if len(data) < seq + 1:
            raise DataError(
                f"data: the {split} split of {name} has {len(data):,} bytes, expected at least {seq + 1:,} "
                f"(one window of {seq:,} and its next byte); give more text or a smaller --seq"
            )
    digest = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in splits.values()))
    tensors = {split: torch.frombuffer(bytearray(data), dtype=torch.uint8) for split, data in splits.items()}
    return Corpus(name, tensors["train"], tensors["validation"], digest.hexdigest())


def training_batch(corpus: Corpus, seed: int, step: int, batch: int, seq: int) -> Tensor:
    """Windows (batch, seq + 1), uint8, that step `step` trains on: a function of seed and step alone.

    A resumed run therefore sees what the uninterrupted one would have, with no state to save.
    """
    # Not torch's generator: it keeps 32 bits of its seed, too few for both numbers. A string seed is hashed whole.
    generator = random.Random(f"{seed} {step}")
    starts = torch.tensor([generator.randrange(len(corpus.train) - seq) for _ in range(batch)])
    return _windows(corpus.train, starts, seq)


def validation_batches(corpus: Corpus, batches: int, batch: int, seq: int) -> Iterator[Tensor]:
    """At most `batches` times (batch, seq + 1), uint8: windows spread evenly over the split, always the same.

    All batches are of one size (a short split may give a single smaller one), so the mean over them is fair.
    """
    last = len(corpus.validation) - seq - 1
    windows = min(batches * batch, last // seq + 1)
    if windows > batch:
        windows -= windows % batch
    starts = torch.linspace(0, last, windows, dtype=torch.float64).long()
    for chunk in starts.split(batch):
        yield _windows(corpus.validation, chunk, seq)


def _windows(data: Tensor, starts: Tensor, seq: int) -> Tensor:
    return data[starts[:, None] + torch.arange(seq + 1)]


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _user_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"data: {path} does not exist")
    if path.is_file():
        return [path]
    visible = (f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts))
    return sorted(f for f in visible if f.is_file())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"data: cannot read {file}: {error.strerror}") from error
