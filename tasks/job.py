"""The job as pydantic models: what the UI form, the command line and the identity read. Defaults are changed here."""

import operator
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from checkpoint_store.config import CheckpointConfig
from tasks.quantization import EoRAConfig, Frozen, GPTQConfig, Quantization, without_unsupported

MEMORY_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kKMGT])(?P<binary>i?)B?")


def _as_choice(schema: dict[str, Any]) -> None:
    """Prefect's UI offers the alternatives of `anyOf`; for `oneOf`, pydantic's word here, it shows a field for raw JSON."""
    schema["anyOf"] = schema.pop("oneOf")


def _or_text(schema: dict[str, Any]) -> None:
    """A size as the description writes it, for the form and the server, who read the schema before validators run."""
    schema["anyOf"].insert(1, {"type": "string"})


def _plain_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


PathText = Annotated[str, Field(min_length=1), BeforeValidator(_plain_path)]


def _token_ids(index: int, item: Iterable[Any]) -> tuple[int, ...]:
    ids = []
    for position, value in enumerate(item):
        try:
            token = operator.index(value)
        except TypeError:
            token = -1
        if token < 0 or isinstance(value, bool):
            raise ValueError(
                f"calibration item {index}: token {position} is {value!r}; ids are whole numbers from 0 upwards"
            )
        ids.append(token)
    return tuple(ids)


class CalibrationConfig(Frozen):
    """Where calibration tokens come from and how they are cut into samples and batches."""

    data: str | tuple[str, ...] | tuple[tuple[int, ...], ...] = Field(
        description="A .txt, .jsonl or .parquet file, a dataset id, texts, or ready-made token ids."
    )
    split: str = Field("train", min_length=1, description="Split of a dataset id.")
    name: str | None = Field(None, description="Configuration name of a dataset id.")
    column: str = Field("text", min_length=1, description="Column with texts, or with lists of token ids.")
    samples: int = Field(128, ge=1, description="At most so many samples are used, the first ones.")
    sequence_length: int = Field(
        2048, ge=1, description="Tokens per sample at most: texts are cut, longer ready-made ids are refused."
    )
    min_length: int = Field(10, ge=1, description="Shorter samples are dropped, and counted.")
    batch_size: int = Field(1, ge=1, description="Samples per forward.")
    concat_size: int | None = Field(None, ge=1, description="Join all samples and cut them anew to this many tokens.")
    concat_separator: str | None = Field(None, description="Text between joined samples.")
    sort: Literal["asc", "desc", "shuffle"] | None = Field(
        None, description="Order of the samples: by length, or shuffled by the job's seed; else as they come."
    )

    @field_validator("data", mode="before")
    @classmethod
    def _one_kind_of_item(cls, data: Any) -> Any:
        """Texts or lists of ids, any iterable of them (a datasets column too); the first wrong item is named."""
        data = _plain_path(data)
        if isinstance(data, str):
            if not data.strip():
                raise ValueError("calibration data is a blank string; name a file or a dataset id, or give a list")
            return data
        if isinstance(data, bytes | Mapping) or not isinstance(data, Iterable):
            raise ValueError(
                f"calibration data is of type `{type(data).__name__}`; give a file name, a dataset id, a list of texts "
                f"or a list of lists of token ids"
            )
        items = list(data)
        if not items:
            raise ValueError("calibration data is an empty list; give at least one text or one list of token ids")
        first_is_text = isinstance(items[0], str)
        for index, item in enumerate(items):
            usable = isinstance(item, str) or (isinstance(item, Iterable) and not isinstance(item, bytes | Mapping))
            if not usable or isinstance(item, str) != first_is_text:
                wanted = "texts" if first_is_text else "lists of token ids"
                raise ValueError(
                    f"calibration item {index} of {len(items)} is of type `{type(item).__name__}`; all items must be "
                    f"{wanted}, like item 0"
                    if index
                    else f"calibration item 0 of {len(items)} is of type `{type(item).__name__}`; items must be texts "
                    f"or lists of token ids"
                )
        return tuple(items) if first_is_text else tuple(_token_ids(i, item) for i, item in enumerate(items))

    @model_validator(mode="after")
    def _lengths_agree(self) -> "CalibrationConfig":
        if self.concat_separator is not None and self.concat_size is None:
            raise ValueError("concat_separator without concat_size joins nothing; give concat_size too")
        if self.concat_size is not None and self.concat_size > self.sequence_length:
            raise ValueError(
                f"concat_size {self.concat_size} is longer than sequence_length {self.sequence_length}; "
                f"raise sequence_length"
            )
        longest = self.concat_size or self.sequence_length
        if self.min_length > longest:
            raise ValueError(
                f"min_length {self.min_length} is longer than any sample may be ({longest} tokens): every sample would "
                f"be dropped; lower min_length"
            )
        return self


class TelemetryConfig(Frozen):
    """Lifecycle events with placement, shape and dtype, never contents; outside the identity."""

    device: bool = Field(
        False, description="Log events of preparation, validation, capture, commit, restoration, failure."
    )


class QuantizationJob(Frozen):
    """One model to quantize, with everything that decides the result and everything that does not."""

    model: PathText = Field(description="Local directory with safetensors weights, or a hub id.")
    output: PathText = Field(
        description="Directory of the finished model; it must not exist, or hold this very job's export."
    )
    quantization: Quantization = Field(
        GPTQConfig(), description="The method and its settings.", json_schema_extra=_as_choice
    )
    adapter: EoRAConfig | None = Field(None, description="A low-rank adapter that is made beside the weights.")
    calibration: CalibrationConfig | None = Field(None, description="Needed by methods that look at activations.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="Where progress is kept, and what is done with what is there."
    )
    devices: Literal["auto"] | tuple[str, ...] = Field(
        "auto",
        description="`auto` takes every visible GPU, else the CPU; or a list such as cuda:0, cuda:1 or cpu, cpu.",
    )
    memory_limit: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Memory that each device, or the host where it computes, may use (`24GB`, `16GiB`, or bytes); all "
        "that it has, unless given. Fewer experts are quantized side by side then, with the same result.",
        json_schema_extra=_or_text,
    )
    hidden_states_limit: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Memory that the calibration samples may take while they pass through a layer (`8GB`, or 0). Beyond it "
        "their hidden states lie in the checkpoint's directory and enter a layer one batch at a time, which takes longer, "
        "with the same result. Without it: beyond what is left of the memory limit, or of the memory that there is.",
        json_schema_extra=_or_text,
    )
    offload_directory: PathText | None = Field(
        None, description="Scratch that `checkpoint.path=auto` may use as its root."
    )
    time_estimate: bool = Field(
        True, description="Whether some seconds of trial work tell beforehand how long the layers will take."
    )
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="What is told about tensors.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random; names of layers are mixed in.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return without_unsupported(data, (), "by a job (some methods have it in `quantization`)")

    @field_validator("quantization", mode="before")
    @classmethod
    def _gptq_unless_named(cls, quantization: Any) -> Any:
        return {"method": "gptq", **quantization} if isinstance(quantization, dict) else quantization

    @field_validator("memory_limit", "hidden_states_limit", mode="before")
    @classmethod
    def _bytes_of_text(cls, limit: Any, info: ValidationInfo) -> Any:
        """`24GB` as people write it is 24000000000."""
        if not isinstance(limit, str) or limit.isdecimal():
            return limit
        match = MEMORY_SIZE.fullmatch(limit.strip())
        if match is None:
            raise ValueError(f"{info.field_name} {limit!r} is no size; write `24GB`, `16GiB`, or bytes")
        binary = 1024 if match["binary"] else 1000
        return int(float(match["number"]) * binary ** ("KMGT".index(match["unit"].upper()) + 1))

    @field_validator("devices", mode="before")
    @classmethod
    def _listed_devices(cls, devices: Any) -> Any:
        """`cpu,cpu` as the command line writes it is ("cpu", "cpu")."""
        if isinstance(devices, str) and devices != "auto":
            devices = tuple(name.strip() for name in devices.split(","))
        if isinstance(devices, list | tuple) and (not devices or "" in devices):
            raise ValueError("devices is empty, or holds an empty name; write `auto`, `cuda:0,cuda:1` or `cpu`")
        return devices


def absolute_path(text: str) -> Path:
    """`text` as an absolute path with `~` and `..` resolved, symbolic links kept."""
    return Path(os.path.abspath(Path(text).expanduser()))


def checkpoint_root(job: QuantizationJob) -> Path:
    """The job's checkpoint root, absolute; `auto` is derived, or refused where a later process would not find it."""
    if job.checkpoint.path != "auto":
        return absolute_path(job.checkpoint.path)
    if job.offload_directory is not None:
        root = absolute_path(job.offload_directory)
    else:
        output = absolute_path(job.output)
        root = output.with_name(f"{output.name}.checkpoint")
    for volatile in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"), Path("/run")):
        if root.resolve().is_relative_to(volatile.resolve()):
            raise ValueError(
                f"checkpoint path `auto` would be `{root}`, below `{volatile}`, which is emptied at a restart: a later "
                f"process would not find the progress; name a durable directory with --checkpoint"
            )
    return root
