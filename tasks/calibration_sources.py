"""Where calibration items come from: a text, jsonl or parquet file, a dataset, or a list in the job.

An item is a text or a list of ready-made token ids; each comes with the words that name it in an error. Files are read
only as far as items are asked for, and nothing is left on disk.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tasks.job import CalibrationConfig, absolute_path

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
TABLE_SUFFIXES = (".jsonl", ".parquet")
LOOKED_AT_CHARACTERS = 1 << 20  # of running text, before a run


class CalibrationError(ValueError):
    """Calibration data that cannot be read or that leaves nothing to calibrate with."""


class Item(NamedTuple):
    """One calibration item, and how an error calls it."""

    where: str
    value: str | list[int]


def file_of(config: CalibrationConfig) -> Path | None:
    """The file that `data` names; None for lists, dataset ids and directories (which `datasets` loads)."""
    if not isinstance(config.data, str):
        return None
    path = absolute_path(config.data)
    if os.path.isdir(path):
        return None
    names_a_file = (
        os.path.exists(path)
        or path.suffix.lower() in TEXT_SUFFIXES + TABLE_SUFFIXES
        or config.data.startswith(("/", "./", "../", "~"))
        or config.data.count("/") > 1
    )
    return path if names_a_file else None


def is_one_document(config: CalibrationConfig) -> bool:
    """Whether the data is one running text, which is cut into windows, rather than a list of separate samples."""
    path = file_of(config)
    return path is not None and _is_text(path)


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in (*TEXT_SUFFIXES, "")


def source_problems(config: CalibrationConfig) -> list[str]:
    """What is wrong with the file that `data` names, as far as can be told without reading it."""
    path = file_of(config)
    if path is None:
        return []
    if not os.path.exists(path):
        return [
            f"calibration file `{path}` does not exist, or not for this user; name a .txt, .jsonl or .parquet file, "
            f"or a dataset id"
        ]
    if not _is_text(path) and path.suffix.lower() not in TABLE_SUFFIXES:
        return [
            f"calibration file `{path}` ends in `{path.suffix}`; a .txt, .jsonl or .parquet file is understood (unpack "
            f"compressed files, export tables as .parquet)"
        ]
    if not os.path.isfile(path):
        return [f"calibration file `{path}` is not a regular file; name a .txt, .jsonl or .parquet file"]
    if not os.access(path, os.R_OK):
        return [f"calibration file `{path}` cannot be read by this user; change its permissions"]
    if path.stat().st_size == 0:
        return [f"calibration file `{path}` is empty; give a file with texts or token ids"]
    return []


def content_problems(config: CalibrationConfig) -> list[str]:
    """What is wrong with the items that are read first, as many as there are samples; hub datasets are not asked.

    Nothing is tokenized: which texts are too short, the run finds out.
    """
    path = file_of(config)
    if source_problems(config) or (isinstance(config.data, str) and path is None):
        return []
    try:
        if path is not None and _is_text(path):
            text, is_whole = leading_text(path, LOOKED_AT_CHARACTERS)
            values: list[str | list[int]] = [text]
        else:
            with closing(items(config)) as found:
                values = [item.value for item in itertools.islice(found, config.samples)]
            is_whole = len(values) < config.samples
    except CalibrationError as error:
        return [str(error)]
    if is_whole and not any(value.strip() if isinstance(value, str) else value for value in values):
        where = f"file `{path}`" if path is not None else "list"
        return [f"calibration {where} holds nothing but blank texts; give texts or token ids"]
    return []


def leading_text(path: Path, characters: int) -> tuple[str, bool]:
    """The first `characters` of a UTF-8 file with its line ends as they are, and whether that is all of it."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read(characters)
            return text, not file.read(1)
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"calibration file `{path}` is not UTF-8 text (byte {error.start} of a block read); convert it, or name a "
            f".jsonl or .parquet file by its own ending"
        ) from error
    except OSError as error:
        raise CalibrationError(f"calibration file `{path}` cannot be read: {error.strerror or error}") from error


def items(config: CalibrationConfig) -> Generator[Item]:
    """The separate samples of `config.data` in their own order; not for running text.

    All items are texts, or all are lists of ids: `CalibrationError` names the first that is neither or of the other kind.
    """
    first: type[str] | type[list[int]] | None = None
    for where, value in _values(config):
        item = Item(where, _item_value(where, value))
        first = first or type(item.value)
        if type(item.value) is not first:
            words: dict[type, str] = {str: "a text", list: "a list of token ids"}
            raise CalibrationError(
                f"{where} is {words[type(item.value)]} where the first item is {words[first]}; give one kind only"
            )
        yield item


def _item_value(where: str, value: object) -> str | list[int]:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CalibrationError(
                f"{where} holds half of a surrogate pair at character {error.start}; no tokenizer can read that: "
                f"write the text as UTF-8"
            ) from error
        return value
    if isinstance(value, list | tuple):
        for position, token in enumerate(value):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CalibrationError(f"{where}: token {position} is {token!r}; ids are whole numbers from 0 upwards")
        return list(value)
    raise CalibrationError(
        f"{where} is of type `{type(value).__name__}`; it must be a text or a list of token ids: clean the data, or "
        f"choose another column"
    )


def _values(config: CalibrationConfig) -> Iterable[tuple[str, object]]:
    if not isinstance(config.data, str):
        return ((f"calibration item {index}", value) for index, value in enumerate(config.data))
    path = file_of(config)
    if path is None:
        return _dataset_values(config)
    if problems := source_problems(config):
        raise CalibrationError(problems[0])
    return _jsonl_values(path, config.column) if path.suffix.lower() == ".jsonl" else _parquet_values(path, config)


def _jsonl_values(path: Path, column: str) -> Iterator[tuple[str, object]]:
    # Line by line and not through `datasets`, whose reader guesses types (a text that looks like a date becomes one)
    # and cannot say which line is wrong.
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"line {number} of `{path}`"
                    yield where, _field(where, _record(where, line), column)
    except OSError as error:
        raise CalibrationError(f"calibration file `{path}` cannot be read: {error.strerror or error}") from error


def _record(where: str, line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where} is not JSON ({error}); each line must hold one whole value") from error


def _field(where: str, record: object, column: str) -> object:
    """A record's column; a line that holds a bare text or list is an item itself."""
    if not isinstance(record, Mapping):
        return record
    if column not in record:
        found = ", ".join(f"`{name}`" for name in record) or "none"
        raise CalibrationError(f"{where} has no column `{column}`; its columns: {found}; choose one with --column")
    return record[column]


def _parquet_values(path: Path, config: CalibrationConfig) -> Iterator[tuple[str, object]]:
    # The split of a lone file is always called `train`, whatever the job's split is.
    return _streamed("parquet", f"`{path}`", config.column, data_files=str(path), split="train")


def _dataset_values(config: CalibrationConfig) -> Iterator[tuple[str, object]]:
    assert isinstance(config.data, str)
    directory = absolute_path(config.data)
    target = str(directory) if os.path.isdir(directory) else config.data
    return _streamed(target, f"dataset `{config.data}`", config.column, name=config.name, split=config.split)


def _streamed(target: str, called: str, column: str, **arguments: Any) -> Iterator[tuple[str, object]]:
    """Rows of a dataset as they are asked for; streaming, in a cache that goes again, since a cache of it is no use."""
    import datasets

    with tempfile.TemporaryDirectory(prefix="calibration-") as cache:
        try:
            rows = datasets.load_dataset(target, streaming=True, cache_dir=cache, **arguments)
            if rows.column_names is not None and column in rows.column_names:
                rows = rows.select_columns([column])
            for number, row in enumerate(rows):
                where = f"row {number} of {called}"
                yield where, _field(where, row, column)
        except CalibrationError:
            raise
        except ConnectionError as error:
            raise CalibrationError(
                f"calibration {called} is no file here, and the hub cannot be reached ({error}); connect, or name a "
                f".txt, .jsonl or .parquet file"
            ) from error
        except Exception as error:  # readers of every format raise their own kinds; the cause stays attached
            raise CalibrationError(
                f"calibration {called} cannot be loaded: {error} ({type(error).__name__}); check the id, split, name "
                f"and column"
            ) from error
