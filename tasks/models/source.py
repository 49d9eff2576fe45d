"""The model as it lies on disk: its configuration and where each tensor is, and the few tensors that are asked for.

Opening reads `config.json`, the index and the shards' headers, and tells everything that is wrong in one list. Loading
reads only the bytes of the named tensors, with plain reads: a mapping would keep the pages of every layer that has
passed in the process's resident memory. FP8 and MXFP4 weights are widened as they are read, and nothing above sees their
scales; nor that a family's files hold experts stacked (stacked_experts.py).
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.models import fp8_weights, stacked_experts
from tasks.models.fp8_weights import FP8Layout, ScaledWeight
from tasks.models.shard_header import HeaderError, TensorInfo, read_header
from tasks.models.stacked_experts import NAN_SCALE, ExpertPart, StackedLayout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
PIECE_BYTES = 4 * 1024 * 1024
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "vocab*", "merges.txt"]
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")

TORCH_DTYPE = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


class SourceError(ValueError):
    """The source model can't be used; `problems` lists everything that is wrong with it."""

    def __init__(self, model: str | os.PathLike[str], problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"the source model `{os.fspath(model)}` can't be used:{lines}")


@dataclass(frozen=True)
class SourceModel:
    """A directory with `config.json` and safetensors shards that agree with each other.

    `config` and `tensors` are those of the model with plain weights, experts one by one. Of a source in a known FP8 layout
    that is not all that its files hold: `stored_config` is the whole of its config.json, `scaled` where its FP8 weights
    and scales lie. `parts` are the tensors that are cut out of stacks.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    stored_config: dict[str, Any]
    layout: FP8Layout | None = None
    scaled: dict[str, ScaledWeight] = field(default_factory=dict)
    stacking: StackedLayout | None = None
    parts: dict[str, ExpertPart] = field(default_factory=dict)

    @classmethod
    def open(cls, model: str) -> "SourceModel":
        """The model in the local directory `model` (symlinks are followed), or fetched from the hub when it is an id.

        Raises SourceError with all problems in one list. No tensor is read.
        """
        path = _directory(model)
        problems: list[str] = []
        config = _read_json(path / "config.json", problems)
        shards, index = _shards(path, problems)
        tensors = _tensors(path, shards, index, problems)
        described, dtype = fp8_weights.described(config), fp8_weights.widened_dtype(config)
        layout, stacking = fp8_weights.layout_of(described), stacked_experts.layout_of(config)
        is_mxfp4 = stacking is not None and stacked_experts.is_mxfp4(described)
        seen = fp8_weights.without_description(config) if layout is not None or is_mxfp4 else config
        scaled: dict[str, ScaledWeight] = {}
        parts: dict[str, ExpertPart] = {}
        if layout is not None and not problems:
            tensors, scaled = fp8_weights.widened(tensors, layout, dtype, problems)
        if stacking is not None and not problems:
            widened = dtype if is_mxfp4 else None
            tensors, parts = stacked_experts.seen_one_by_one(tensors, stacking, widened, problems)
        if problems:
            raise SourceError(model, problems)
        return cls(path, seen, tensors, shards, config, layout, scaled, stacking, parts)

    def load(
        self, names: Iterable[str], device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """The named tensors, contiguous, on `device`; floating ones as `dtype` when it is given.

        One tensor at a time is held twice. Nothing else is read. Safe to call from several threads.
        """
        names = list(names)
        absent = [f"there is no tensor `{name}`" for name in names if name not in self.tensors]
        if absent:
            raise SourceError(self.path, absent)
        return {name: _placed(self._read(name, None), device, dtype) for name in names}

    def load_stacked(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors as the model's own code takes them: those of experts that the files stack as whole stacks."""
        names = list(names)
        stacks = {self.parts[name].stack.name: self.parts[name] for name in names if name in self.parts}
        plain = self.load([name for name in names if name not in self.parts])
        return plain | {
            name: part.stack.whole(partial(self._bytes_of, name), TORCH_DTYPE[part.stack.dtype])
            for name, part in stacks.items()
        }

    def load_rows(self, name: str, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """The first `rows` rows of one tensor on the CPU, without reading the others."""
        return _placed(self._read(name, rows), "cpu", dtype)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes; read piece by piece."""
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        if {name, other} & (self.scaled.keys() | self.parts.keys()):
            return torch.equal(self._read(name, None), self._read(other, None))
        with open(self.path / one.file, "rb") as here, open(self.path / two.file, "rb") as there:
            here.seek(one.start)
            there.seek(two.start)
            left = one.size_bytes
            while left:
                piece = here.read(min(left, PIECE_BYTES))
                if not piece or piece != there.read(len(piece)):
                    return False
                left -= len(piece)
        return True

    def stored_bytes(self, name: str) -> int:
        """Bytes of one tensor in the files, with its scales where it has some."""
        if name in self.parts:
            return self.parts[name].stored_bytes
        return self.scaled[name].size_bytes if name in self.scaled else self.tensors[name].size_bytes

    def scale_problems(self) -> list[str]:
        """A sentence for each widened weight whose scales are not all finite; reads the scales, which are few bytes."""
        return [
            f"the scales of `{name}` hold {count} values that are NaN: the file is damaged, fetch it again"
            for name, part in self.parts.items()
            if part.stack.scales is not None
            and (count := int((self._bytes_of(name, part.scales, None) == NAN_SCALE).sum()))
        ] + [
            f"`{self.layout.scale_of(name)}` holds {count} values that are NaN or infinite: the "
            f"file is damaged, fetch it again"
            for name, scaled in self.scaled.items()
            if self.layout is not None
            and (count := int((~self._bytes_of(name, scaled.scales, None).float().isfinite()).sum()))
        ]

    def _read(self, name: str, rows: int | None) -> Tensor:
        if name in self.parts:
            part = self.parts[name]
            return part.read(partial(self._bytes_of, name), TORCH_DTYPE[part.stack.dtype])[:rows]
        scaled = self.scaled.get(name)
        if scaled is None:
            return self._bytes_of(name, self.tensors[name], rows)
        values_NK, scales = self._bytes_of(name, scaled.values, rows), self._bytes_of(name, scaled.scales, None)
        return fp8_weights.dequantize(values_NK, scales, scaled.block, TORCH_DTYPE[self.tensors[name].dtype])

    def _bytes_of(self, name: str, info: TensorInfo, rows: int | None = None) -> Tensor:
        """A tensor, or its first rows, as it lies in its file."""
        if info.dtype not in TORCH_DTYPE:
            raise SourceError(self.path, [f"`{name}` has the dtype {info.dtype}, which torch can't hold"])
        shape = info.shape if rows is None else (rows, *info.shape[1:])
        size = info.size_bytes if rows is None else info.size_bytes // info.shape[0] * rows
        raw = torch.empty(size, dtype=torch.uint8)
        with open(self.path / info.file, "rb", buffering=0) as shard:
            shard.seek(info.start)
            view, filled = raw.numpy().data, 0
            while filled < size:  # one read gives at most 2 GiB
                count = shard.readinto(view[filled:])
                if not count:
                    raise SourceError(self.path, [f"`{info.file}` became shorter while it was read: `{name}` is cut"])
                filled += count
        return raw.view(TORCH_DTYPE[info.dtype]).reshape(shape)


def _placed(tensor: Tensor, device: str | torch.device, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _directory(model: str) -> Path:
    path = Path(model).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, False below a directory that this user may not enter
        return path
    if os.path.exists(path):
        raise SourceError(model, ["it is a file; name the directory that holds config.json and the safetensors files"])
    if not HUB_ID.fullmatch(model):
        raise SourceError(model, ["there is no such directory, and it is not a hub id (`name` or `owner/name`)"])
    return _hub_snapshot(model)


def _hub_snapshot(hub_id: str) -> Path:
    import httpx  # with huggingface_hub imported only here: a local model needs neither, and they take a second
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        # Subdirectories hold the same weights again for other programs (original/, onnx/).
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=["*/*", "consolidated*"]))
    except GatedRepoError as error:
        raise SourceError(
            hub_id, ["the hub shows it only to accounts it was granted to: log in with `hf auth login`"]
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            hub_id, ["there is no such local directory, and the hub shows no such model (to this account)"]
        ) from error
    except (LocalEntryNotFoundError, httpx.TransportError) as error:
        raise SourceError(
            hub_id,
            [
                "there is no such local directory, the hub can't be reached, and its cache does not hold the model; "
                "check the network, or name a local directory"
            ],
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise SourceError(
            hub_id, [f"there is no such local directory, and the hub answers: {_first_line(error)}"]
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # Python reads more than can be written again
    except FileNotFoundError:
        problems.append(f"`{path.name}` is missing")
        return {}
    except OSError as error:
        problems.append(f"`{path.name}` can't be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"`{path.name}` is not JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"`{path.name}` is not a JSON object")
        return {}
    return value


def _shards(path: Path, problems: list[str]) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """Names of the shards that exist, and which tensor the index puts where (None without an index)."""
    present = sorted(file.name for file in path.glob("*.safetensors"))
    if not (path / INDEX_FILE).exists():
        if SINGLE_FILE not in present:
            problems.append(_why_nothing_is_there(path, present))
            return (), None
        stray = [name for name in present if SHARD_NAME.fullmatch(name) and name != SINGLE_FILE]
        if stray:
            problems.append(f"{_listed(stray)} beside `{SINGLE_FILE}` without `{INDEX_FILE}`: which are the weights?")
        return (SINGLE_FILE,), None
    before = len(problems)
    index = _read_json(path / INDEX_FILE, problems)
    if len(problems) > before:
        return (), None
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        problems.append(f"`{INDEX_FILE}` has no `weight_map` from tensor names to file names")
        return (), None
    named = sorted(set(places.values()))
    problems += [f"`{INDEX_FILE}` names `{file}`, which is not there" for file in named if file not in present]
    unnamed = [file for file in present if SHARD_NAME.fullmatch(file) and file not in named]
    problems += [f"`{file}` stands beside `{INDEX_FILE}`, which does not name it; remove one" for file in unnamed]
    return tuple(file for file in named if file in present), places


def _why_nothing_is_there(path: Path, present: list[str]) -> str:
    if present:
        return f"there is neither `{SINGLE_FILE}` nor `{INDEX_FILE}`, only {_listed(present)}"
    others = sorted(file.name for pattern in OTHER_WEIGHTS for file in path.glob(pattern))
    if others:
        return (
            f"it has no safetensors files, only {_listed(others)}; save it with transformers' "
            f"`save_pretrained` first: other formats are not read (pickles can run code)"
        )
    return f"it has no weights: neither `{SINGLE_FILE}` nor `{INDEX_FILE}`"


def _tensors(
    path: Path, shards: tuple[str, ...], index: dict[str, str] | None, problems: list[str]
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    holders: Counter[str] = Counter()
    unreadable = set()
    for shard in shards:
        try:
            found = read_header(path / shard, shard)
        except HeaderError as error:
            problems.append(str(error))
            unreadable.add(shard)
            continue
        for name, info in found.items():
            if name in tensors:
                problems.append(f"`{name}` is in `{tensors[name].file}` and again in `{shard}`")
            elif index is not None and name not in index:
                problems.append(f"`{name}` of `{shard}` is in no index")
            tensors[name] = info
        holders.update(found.keys())
    for name, file in (index or {}).items():
        if file in shards and file not in unreadable and holders[name] < 2:
            if name not in tensors:
                problems.append(f"`{INDEX_FILE}` puts `{name}` into `{file}`, which does not hold it")
            elif tensors[name].file != file:
                problems.append(f"`{INDEX_FILE}` puts `{name}` into `{file}`; it is in `{tensors[name].file}`")
    return tensors


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more
