"""Calibration: items of any source become batches of token ids with exact masks, the same for one job in any process.

Running text is cut into windows of `sequence_length` tokens. A separate text is one sample, cut to that length; ready-made
ids are one sample as they are. With `concat_size` all items are joined first and cut anew. The first `samples` samples of
at least `min_length` tokens are taken in their own order, then sorted, then batched; padding is on the right, where no
causal layer lets a real token see it, and False in the mask.
"""

import itertools
import json
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from tasks.calibration_sources import (
    CalibrationError,
    file_of,
    is_one_document,
    items,
    leading_text,
    source_problems,
)
from tasks.job import CalibrationConfig

__all__ = ["Batch", "CalibrationError", "CalibrationSet", "prepare", "source_problems"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
# Masked positions hold this id, which every vocabulary has: no tokenizer needs a pad token.
PADDING_ID = 0
# Of running text no more is read than gives the windows asked for; 8 is generous for a token of any language.
CHARACTERS_PER_TOKEN = 8
# A text cut in mid-word may end in other tokens than the whole: so many at its end are not relied on.
UNSURE_TOKENS = 64


@dataclass(frozen=True)
class Batch:
    """Samples of one forward, padded on the right to the longest: B samples, T tokens."""

    input_ids: Tensor  # int64 [B, T]
    attention_mask: Tensor  # bool [B, T], False where padding is


@dataclass(frozen=True)
class CalibrationSet:
    """All batches in the order in which they are run; `digest` is XXH3-128 of ids, order and batching, hexadecimal.

    `summary` counts items, blank, too_short and truncated ones, samples, batches, tokens, padding, shortest, longest.
    """

    batches: tuple[Batch, ...]
    summary: dict[str, int]
    digest: str


def prepare(config: CalibrationConfig, source_path: Path, *, seed: int) -> CalibrationSet:
    """Read, tokenize with the source model's tokenizer, cut, sort and batch; `seed` is the job's, for `sort="shuffle"`.

    No tokenizer is needed for ready-made ids. Raises `CalibrationError`, with counts and the index of the item, for data
    that cannot be read, ids that the model's vocabulary lacks, and data that leaves no sample.
    """
    if problems := source_problems(config):
        raise CalibrationError(problems[0])
    reader = _Reader(config, source_path)
    with closing(reader.samples()) as samples_read:
        samples = list(itertools.islice(samples_read, config.samples))
    if not samples:
        raise CalibrationError(reader.nothing_left())
    samples = _sorted(samples, config.sort, seed)
    batches = tuple(_batch(samples[i : i + config.batch_size]) for i in range(0, len(samples), config.batch_size))
    lengths = [len(ids) for ids in samples]
    summary = {
        **{name: reader.counts[name] for name in ("items", "blank", "too_short", "truncated")},
        "samples": len(samples),
        "batches": len(batches),
        "tokens": sum(lengths),
        "padding": sum(batch.input_ids.numel() for batch in batches) - sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
    }
    return CalibrationSet(batches, summary, _digest(samples, config.batch_size))


def tokenizer_problems(config: CalibrationConfig, source_path: Path) -> list[str]:
    """Whether the source lacks a tokenizer for data that is known to be text without reading a file."""
    is_text = is_one_document(config) or (isinstance(config.data, tuple) and isinstance(config.data[0], str))
    return [_no_tokenizer(source_path)] if is_text and not _holds_tokenizer(source_path) else []


def _holds_tokenizer(source_path: Path) -> bool:
    return any((source_path / name).exists() for name in TOKENIZER_FILES)


def _no_tokenizer(source_path: Path) -> str:
    return (
        f"source `{source_path}` holds no tokenizer ({', '.join(TOKENIZER_FILES)}); copy its tokenizer there, or give "
        f"ready-made token ids"
    )


class _Reader:
    """Items as token ids, cut into samples; counts what it drops."""

    def __init__(self, config: CalibrationConfig, source_path: Path) -> None:
        self.config = config
        self.source_path = source_path
        self.vocabulary_size = _vocabulary_size(source_path)
        self.sample_size = config.concat_size or config.sequence_length
        self.counts: Counter[str] = Counter()
        self.longest = 0

    def samples(self) -> Generator[list[int]]:
        """Samples of `min_length` tokens up to the sample size, in the order of the data."""
        for ids in self._pieces():
            self.longest = max(self.longest, len(ids))
            if len(ids) < self.config.min_length:
                self.counts["too_short"] += 1
            else:
                yield ids

    def nothing_left(self) -> str:
        data = f"`{self.config.data}`" if isinstance(self.config.data, str) else "the list given"
        return (
            f"calibration data {data} leaves no sample: {self.counts['items']} items read, {self.counts['blank']} blank, "
            f"{self.counts['too_short']} shorter than min_length {self.config.min_length} tokens (the longest has "
            f"{self.longest}); give longer texts, join them with concat_size, or lower min_length"
        )

    def _pieces(self) -> Generator[list[int]]:
        if is_one_document(self.config):
            return _cut([self._document()], self.sample_size)
        if self.config.concat_size is not None:
            return _cut(self._joined(), self.sample_size)
        return self._separate()

    def _document(self) -> list[int]:
        path = file_of(self.config)
        assert path is not None
        self.counts["items"] += 1
        wanted = self.config.samples * self.sample_size
        characters = CHARACTERS_PER_TOKEN * (wanted + UNSURE_TOKENS)
        while True:
            text, is_whole = leading_text(path, characters)
            if not text.strip() and is_whole:
                self.counts["blank"] += 1
                return []
            ids = self._encoded(f"text of `{path}`", text)
            if is_whole:
                return ids[:wanted]
            if len(ids) >= wanted + UNSURE_TOKENS:
                return ids[:wanted]
            characters *= 4

    def _joined(self) -> Generator[list[int]]:
        separator = self.config.concat_separator
        separator_ids = self._tokenize("concat_separator", separator, add_special_tokens=False) if separator else []
        self._require_vocabulary("concat_separator", separator_ids)
        for number, (_, ids) in enumerate(self._items()):
            yield separator_ids + ids if number else ids

    def _separate(self) -> Generator[list[int]]:
        size = self.sample_size
        for (where, is_text), ids in self._items():
            if len(ids) > size and not is_text:
                raise CalibrationError(
                    f"{where} has {len(ids)} token ids, more than sequence_length {size}; ready-made ids are used as "
                    f"they are: raise sequence_length, cut the item, or set concat_size"
                )
            self.counts["truncated"] += len(ids) > size
            yield ids[:size]

    def _items(self) -> Generator[tuple[tuple[str, bool], list[int]]]:
        """((what an error calls it, whether it was a text), ids) of every item that is not blank."""
        with closing(items(self.config)) as found:
            for where, value in found:
                self.counts["items"] += 1
                if not (value.strip() if isinstance(value, str) else value):
                    self.counts["blank"] += 1
                elif isinstance(value, str):
                    yield (where, True), self._encoded(where, value)
                else:
                    self._require_vocabulary(where, value)
                    yield (where, False), value

    def _encoded(self, where: str, text: str) -> list[int]:
        ids = self._tokenize(where, text)
        self._require_vocabulary(where, ids)
        return ids

    def _tokenize(self, where: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            # Not verbose: texts longer than the model's context are cut by us afterwards.
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        except Exception as error:  # tokenizers raise a bare Exception
            raise CalibrationError(
                f"{where} cannot be tokenized: {error}; give ready-made token ids instead"
            ) from error

    @cached_property
    def _tokenizer(self) -> Any:
        if not _holds_tokenizer(self.source_path):
            raise CalibrationError(_no_tokenizer(self.source_path))
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.source_path), local_files_only=True)
        except Exception as error:  # a broken tokenizer.json is a bare Exception
            raise CalibrationError(
                f"tokenizer of source `{self.source_path}` cannot be loaded: {error}; mend its files, or give ready-made "
                f"token ids"
            ) from error

    def _require_vocabulary(self, where: str, ids: list[int]) -> None:
        if ids and max(ids) >= self.vocabulary_size:
            position = next(i for i, token in enumerate(ids) if token >= self.vocabulary_size)
            raise CalibrationError(
                f"{where}: token {position} is {ids[position]}, but the model's vocabulary has {self.vocabulary_size} "
                f"tokens (0 to {self.vocabulary_size - 1}); the ids or the tokenizer belong to another model"
            )


def _vocabulary_size(source_path: Path) -> int:
    path = source_path / "config.json"
    try:
        config = json.loads(path.read_bytes())
        size = config.get("vocab_size") or config["text_config"].get("vocab_size")
        if size is None:  # a wrapper's text model of the family's usual size, which its config.json does not tell
            from transformers import AutoConfig

            size = AutoConfig.from_pretrained(source_path, local_files_only=True).get_text_config().vocab_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"`{path}` does not tell the size of the vocabulary ({error!r}); mend the file"
        ) from error
    if not isinstance(size, int) or size < 1:
        raise CalibrationError(f"`{path}` says that the vocabulary has {size!r} tokens; mend the file")
    return size


def _cut(documents: Iterable[list[int]], size: int) -> Generator[list[int]]:
    """Windows of `size` tokens over all documents as one sequence; the last may be shorter."""
    window: list[int] = []
    for ids in documents:
        window += ids
        whole = len(window) - len(window) % size
        for start in range(0, whole, size):
            yield window[start : start + size]
        window = window[whole:]
    if window:
        yield window


def _sorted(samples: list[list[int]], sort: str | None, seed: int) -> list[list[int]]:
    """Stable by length, or in the order of a hash of seed and index, which no library version can change."""
    if sort == "shuffle":
        order = sorted(range(len(samples)), key=lambda i: xxhash.xxh3_128_digest(f"calibration:{seed}:{i}".encode()))
        return [samples[i] for i in order]
    if sort is None:
        return samples
    return sorted(samples, key=len, reverse=sort == "desc")


def _batch(samples: list[list[int]]) -> Batch:
    longest = max(len(ids) for ids in samples)
    input_ids = torch.full((len(samples), longest), PADDING_ID, dtype=torch.int64)
    attention_mask = torch.zeros((len(samples), longest), dtype=torch.bool)
    for row, ids in enumerate(samples):
        input_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        attention_mask[row, : len(ids)] = True
    return Batch(input_ids, attention_mask)


def _digest(samples: list[list[int]], batch_size: int) -> str:
    hasher = xxhash.xxh3_128()
    hasher.update(batch_size.to_bytes(8, "little"))
    for ids in samples:
        hasher.update(len(ids).to_bytes(8, "little"))
        hasher.update(b"".join(token.to_bytes(8, "little") for token in ids))
    return hasher.hexdigest()
