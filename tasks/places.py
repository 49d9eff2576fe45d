"""The three places of a job (source, checkpoint, output): apart from each other, writable, with space for what comes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tasks.plan import DiskSpace, size
from tasks.report import REPORT_FILE

# Copied as they are: a strict saver that rejects a shipped file must not cost a finished run.
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
LEGAL_FILES = (
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "USE_POLICY.md",
)


def overlaps(places: dict[str, Path]) -> Iterator[str]:
    """Pairs of places that are one directory, or one inside the other, links resolved."""
    real = {name: Path(os.path.realpath(path)) for name, path in places.items()}
    names = list(real)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            inner, outer = (one, other) if real[one].is_relative_to(real[other]) else (other, one)
            if real[one] == real[other]:
                relation = f"{one} and {other} are one place, `{real[one]}`"
            elif real[inner].is_relative_to(real[outer]):
                relation = f"{inner} `{real[inner]}` lies inside {outer} `{real[outer]}`"
            else:
                continue
            yield f"{relation}; source, checkpoint and output must be three separate directories"


def unwritable(name: str, path: Path) -> Iterator[str]:
    existing = _nearest_existing(path)
    if not os.path.isdir(existing):
        yield f"{name} `{path}` can't be a directory: `{existing}` is there and is none; name another place"
    elif not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        yield f"{name} `{path}` can't be used: this user may not list and write `{existing}`; change its owner or mode"


def partial_name(output: Path, identifier: str) -> str:
    """Name of the directory, beside or inside `output`, in which a run builds it."""
    return f".{output.name}.partial-{identifier}"


def unnameable(output: Path) -> Iterator[str]:
    """A name that is too long for the file system once it is that of the directory in the making."""
    longest = os.pathconf(_nearest_directory(output), "PC_NAME_MAX")
    surplus = len(os.fsencode(partial_name(output, "0" * 32))) - longest
    if surplus > 0:
        yield (
            f"output `{output}` can't be built: its name is {surplus} bytes too long (the directory in the making has "
            f"{len(partial_name(Path('x'), '0' * 32)) - 1} more, the file system takes {longest}); shorten it"
        )


def occupied(output: Path) -> Iterator[str]:
    if not os.path.isdir(output) or not os.access(output, os.R_OK | os.X_OK):
        return  # told by `unwritable`, if it can't be made
    if os.path.isfile(output / REPORT_FILE):
        return  # whose export it is, the run finds out when the job's identity is known
    # A run that died while it filled an existing directory leaves its own, which the export cleans up.
    partial = partial_name(output, "")
    names = sorted(entry.name for entry in os.scandir(output))
    if os.path.ismount(output):
        names = [name for name in names if name != "lost+found"]
    if names and not any(name.startswith(partial) for name in names):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        listed = ", ".join(f"`{name}`" for name in names[:3])
        yield f"output `{output}` is not empty ({listed}{more}) and holds no finished export; name another directory"


def _nearest_existing(path: Path) -> Path:
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return Path(os.path.realpath(path))


def _nearest_directory(path: Path) -> Path:
    existing = _nearest_existing(path)
    while not os.path.isdir(existing):
        existing = existing.parent
    return existing


def space_at(purpose: str, path: Path, needed: int, present: int) -> DiskSpace:
    existing = _nearest_directory(path)
    found = os.statvfs(existing)
    # f_bavail: what an ordinary user may still write.
    return DiskSpace(purpose, path, needed, present, found.f_bavail * found.f_frsize, existing.stat().st_dev)


def bytes_of_objects(root: Path) -> int:
    """Bytes of the objects of a checkpoint root: what an earlier run has written need not be free again."""
    total = 0
    for directory, _, files in os.walk(root / "objects"):
        for file in files:
            with suppress(FileNotFoundError):  # a sweep may take files away while we look
                total += os.lstat(os.path.join(directory, file)).st_size
    return total


def space_problems(spaces: tuple[DiskSpace, ...]) -> Iterator[str]:
    """What does not fit, place by place, and together where places share a file system."""
    told = False
    for space in spaces:
        if space.missing_bytes > space.free_bytes:
            told = True
            yield (
                f"no space for the {space.purpose}: `{space.path}` needs {size(space.missing_bytes)} more, "
                f"{size(space.free_bytes)} are free on its file system; free some or name another disk"
            )
    together = sum(space.missing_bytes for space in spaces)
    if not told and len({space.filesystem for space in spaces}) == 1 and together > spaces[0].free_bytes:
        yield (
            f"no space for {' and '.join(space.purpose for space in spaces)} on one file system: they need "
            f"{size(together)} more, {size(spaces[0].free_bytes)} are free; free some or put one on another disk"
        )


def copied_files(source: Path, is_one_file: bool) -> list[Path]:
    """The source's files that an export holds as they are; one file, a .gguf, holds all but the legal ones itself."""
    names = LEGAL_FILES if is_one_file else (*COPIED_FILES, *LEGAL_FILES)
    return [source / name for name in names if (source / name).is_file()]
