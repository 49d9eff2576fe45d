"""What a user may set about checkpoints; none of it is part of a job's identity."""

import os
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

KEEP_LAST_MOST = 256  # so many entries fit into CURRENT
_INTERVAL = "layer:[1-9][0-9]{0,5}"


class CheckpointConfig(BaseModel):
    """Where progress is kept, when it is published, and what a run does with progress that it finds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(
        "auto",
        min_length=1,
        description="Checkpoint root. An explicit durable path is recommended; `auto` derives a stable one from the "
        "offload directory or the output, and is refused where it would not survive the process.",
    )
    resume: Literal["auto", "required", "never"] = Field(
        "auto",
        description="`auto` starts or resumes, `required` fails without a published checkpoint, `never` fails with one.",
    )
    interval: str = Field(
        "layer:1",
        description="Publish after every so many finished layers; the last always is.",
        json_schema_extra={"pattern": f"^{_INTERVAL}$"},  # for a form; this program's own words are below
    )
    keep_last: int = Field(2, ge=2, le=KEEP_LAST_MOST, description="Published generations retained for fallback.")
    strict_device_check: bool = Field(
        True, description="Require the physical GPU uuid and serial that the checkpoint records."
    )
    allow_network_filesystem: bool = Field(
        False, description="Accept a root on NFS, SMB, Lustre or FUSE, whose locks and syncs may not hold."
    )

    @field_validator("path", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("interval")
    @classmethod
    def _interval_is_layers(cls, value: str) -> str:
        if not re.fullmatch(_INTERVAL, value):
            raise ValueError(f"interval `{value}` is not understood; write `layer:1`, `layer:2`, ...")
        return value

    @property
    def interval_layers(self) -> int:
        return int(self.interval.split(":")[1])
