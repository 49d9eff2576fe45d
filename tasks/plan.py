"""What a run will make and need, as preflight reckons it from headers alone: data, a table for people, JSON for programs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModuleKind:
    """The linears of one name in all layers, together."""

    name: str  # within its layer
    out_features: int
    in_features: int
    count: int
    bytes_before: int
    bytes_after: int

    @property
    def bits_per_weight(self) -> float:
        """Everything that is stored for them, scales and zero points too, per weight."""
        return self.bytes_after * 8 / (self.out_features * self.in_features * self.count)


@dataclass(frozen=True)
class DiskSpace:
    """What will be written below `path`, what of it lies there already, and what is free on its file system."""

    purpose: str
    path: Path
    needed_bytes: int
    present_bytes: int
    free_bytes: int
    filesystem: int  # st_dev: places on one file system share what is free

    @property
    def missing_bytes(self) -> int:
        return max(0, self.needed_bytes - self.present_bytes)


@dataclass(frozen=True)
class Memory:
    """Reckoned peak, beside the interpreter and its libraries, on one device of the pool and on the host.

    `layer_bytes` is the largest layer as it is computed with (of methods that run no layer: as it is stored),
    `statistics_bytes` the Hessian and its factor, and `least_bytes` what a device holds of them whatever the
    calibration. On a CPU pool all slots and the host share one memory.
    """

    layer_bytes: int
    statistics_bytes: int
    least_bytes: int
    device_peak_bytes: int
    device_total_bytes: int
    host_peak_bytes: int
    host_total_bytes: int
    layers_at_once: int = 1  # on shares of the pool; more than one only where no layer needs the one before


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds that each layer will take, in their order, by a trial that took `trial_seconds`."""

    layer_seconds: tuple[float, ...]
    trial_seconds: float

    def told(self, first: int = 0) -> str:
        """For the layers from `first` on, as people say it."""
        left = self.layer_seconds[first:]
        return f"about {duration(sum(left))} for {len(left)} layers"


@dataclass(frozen=True)
class Plan:
    """A job that preflight found nothing wrong with. Sizes are bytes; those of weights are exact but for file headers."""

    model: str
    family: str
    layer_count: int
    quantization: dict[str, Any]
    summary: str  # method and settings in a line
    modules: tuple[ModuleKind, ...]
    carried_bytes: int  # norms and the like inside the layers, as they are in the source
    carried_bytes_after: int  # as they are exported
    outer_bytes: int  # embeddings, final norm, head
    outer_bytes_after: int
    adapter_bytes: int  # matrices of an adapter; 0 where none is made
    tensor_table: str  # type of each tensor, where the layout chooses one; else empty
    devices: tuple[str, ...]
    calibration_samples: int  # at most; 0 where the method needs none
    calibration_tokens: int  # at most
    continuation_bytes: int  # hidden states that one generation holds, at most
    samples_bytes: int  # what all samples take while they pass through a layer in memory, at most
    spills: bool  # whether they lie in files instead and pass one batch at a time
    spaces: tuple[DiskSpace, ...]
    memory: Memory
    notes: tuple[str, ...]
    time: TimeEstimate | None = None  # where it was asked for

    @property
    def bytes_before(self) -> int:
        return sum(kind.bytes_before for kind in self.modules) + self.carried_bytes + self.outer_bytes

    @property
    def bytes_after(self) -> int:
        return self.layers_after + self.outer_bytes_after + self.adapter_bytes

    @property
    def layers_after(self) -> int:
        """Bytes of all layers' objects."""
        return sum(kind.bytes_after for kind in self.modules) + self.carried_bytes_after

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, with the totals."""
        plan = asdict(self)
        plan["modules"] = [{**asdict(kind), "bits_per_weight": round(kind.bits_per_weight, 3)} for kind in self.modules]
        plan["spaces"] = [{**asdict(space), "path": str(space.path)} for space in self.spaces]
        for space in plan["spaces"]:
            del space["filesystem"]
        lists = {name: list(plan[name]) for name in ("devices", "notes")}
        return {**plan, **lists, "bytes_before": self.bytes_before, "bytes_after": self.bytes_after}

    def table(self) -> str:
        """Plain text for a terminal: the modules with their sizes, totals, space, memory, notes."""
        return "\n".join(
            [
                self._headline(),
                "",
                *self._module_lines(),
                *self._tensor_lines(),
                "",
                *self._need_lines(),
                *self._note_lines(),
            ]
        )

    def _headline(self) -> str:
        return f"{self.model}: {self.family}, {self.layer_count} layers -> {self.summary}"

    def _module_lines(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("module", "shape", "count", "before", "after", "bits/weight")]
        rows += [
            (
                kind.name,
                f"{kind.out_features} x {kind.in_features}",
                str(kind.count),
                size(kind.bytes_before),
                size(kind.bytes_after),
                f"{kind.bits_per_weight:.2f}",
            )
            for kind in self.modules
        ]
        for name, before, after in (
            ("norms and others", self.carried_bytes, self.carried_bytes_after),
            ("embeddings and head", self.outer_bytes, self.outer_bytes_after),
        ):
            rows.append((f"{name}, kept" if before == after else name, "", "", size(before), size(after), ""))
        if self.adapter_bytes:
            rows.append(("adapter", "", "", "", size(self.adapter_bytes), ""))
        rows.append(("total", "", "", size(self.bytes_before), size(self.bytes_after), ""))
        lines = _aligned(rows)
        rule = "-" * max(map(len, lines))
        return [lines[0], rule, *lines[1:-1], rule, lines[-1]]

    def _tensor_lines(self) -> list[str]:
        return ["", *self.tensor_table.splitlines()] if self.tensor_table else []

    def _need_lines(self) -> list[str]:
        rows = []
        if self.calibration_samples:
            rows.append(
                ("calibration", f"at most {self.calibration_samples} samples, {self.calibration_tokens:,} tokens")
            )
            where = "in files in the checkpoint's directory, one batch at a time" if self.spills else "in memory"
            rows.append(("", f"{size(self.samples_bytes)} while they pass through a layer: {where}"))
        for space in self.spaces:
            there = f", {size(space.present_bytes)} of it there" if space.present_bytes else ""
            rows.append(
                (space.purpose, f"{space.path}: needs {size(space.needed_bytes)}{there}; {size(space.free_bytes)} free")
            )
        memory = self.memory
        rows.append(
            (
                "memory",
                f"about {size(memory.host_peak_bytes)} of {size(memory.host_total_bytes)} on the host, beside 1 GB for the program itself and Prefect's server; the largest layer has {size(memory.layer_bytes)}",
            )
        )
        if memory.device_total_bytes and any(name != "cpu" for name in self.devices):
            rows.append(
                ("", f"about {size(memory.device_peak_bytes)} of {size(memory.device_total_bytes)} on each device")
            )
        at_once = f"; {memory.layers_at_once} layers at a time" if memory.layers_at_once > 1 else ""
        rows.append(("devices", ", ".join(self.devices) + at_once))
        if self.time is not None:
            rows.append(("time", f"{self.time.told()}, by a trial of {self.time.trial_seconds:.1f} s on this machine"))
        return [f"{name:<13}{text}" for name, text in rows]

    def _note_lines(self) -> list[str]:
        return ["", *(f"note: {note}" for note in self.notes)] if self.notes else []


def size(count: int) -> str:
    """Bytes as people read them, in decimal units as disks are sold."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """A span of time as people say it, to about a tenth of it: `3 h 10 min`, `25 min`, `40 s`."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(10 * round(minutes / 10), 60)
    return f"{hours} h {minutes} min" if minutes and hours < 10 else f"{round(hours + minutes / 60)} h"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
