"""Preflight: everything that can be known to go wrong, from config.json, headers and the file system, in one list.

Nothing is written, no tensor is read but the scales of an FP8 source, and Prefect is not asked. What passes comes back as a `Plan`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks import adapters, ruled_modules
from tasks.calibration import source_problems, tokenizer_problems
from tasks.calibration_sources import content_problems, file_of
from tasks.devices import DevicePool
from tasks.formats import peft
from tasks.job import CalibrationConfig, QuantizationJob, absolute_path, checkpoint_root
from tasks.memory_estimate import MemoryEstimate
from tasks.models.decoder import Decoder
from tasks.models.families import refusal
from tasks.models.layer_names import ROUTERS
from tasks.models.source import SourceError, SourceModel
from tasks.module_rules import ModuleConfigs
from tasks.places import (
    bytes_of_objects,
    occupied,
    overlaps,
    space_at,
    space_problems,
    unnameable,
    unwritable,
)
from tasks.plan import DiskSpace, Memory, ModuleKind, Plan, size
from tasks.report import REPORT_FILE
from tasks.schemes import READ_ONE_BY_ONE, Scheme, decoder_of, layout_name, needs_activations, scheme_of, streams
from tasks.time_estimate import Trial

# What a run writes about each module: its part of a record, of manifests, of the report.
RECORD_BYTES_PER_MODULE = 1000
REPORT_BYTES_PER_MODULE = 300
EXPERT_NUMBER = re.compile(r"(?<=experts)\.\d+\.")
LAYER_WEIGHT = re.compile(r"(?:.+\.)?layers\.\d+\.(.+)\.weight")


class PreflightError(ValueError):
    """The job can't be run as it is; `problems` lists everything that was found, each with how to mend it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"the job can't be run, {count}:" + "".join(f"\n  - {problem}" for problem in self.problems))


def check(job: QuantizationJob, *, trial: bool = False) -> Plan:
    """The plan of a job that can be run; PreflightError with all problems of one that can't.

    With `trial`, and unless the job wants none, some seconds of trial work tell how long it will take.
    """
    findings = _Findings(job)
    findings.look_at_source()
    findings.look_at_devices()
    findings.look_at_calibration()
    findings.look_at_places()
    findings.look_at_shapes()
    plan = findings.plan()
    if plan is not None:
        findings.problems += space_problems(plan.spaces)
        findings.problems += _memory_problems(plan.memory, plan.devices, job.memory_limit)
    if plan is None or findings.problems:
        raise PreflightError(findings.problems)
    return findings.tried(plan) if trial and job.time_estimate else plan


@dataclass
class _Findings:
    """What has been found out about a job so far; parts that could not be had are None and named in `problems`."""

    job: QuantizationJob
    problems: list[str] = field(default_factory=list)
    source: SourceModel | None = None
    decoder: Decoder | None = None
    pool: DevicePool | None = None
    root: Path | None = None

    @property
    def output(self) -> Path:
        return absolute_path(self.job.output)

    @property
    def calibration(self) -> CalibrationConfig | None:
        return self.job.calibration if needs_activations(self.job.quantization) else None

    def look_at_source(self) -> None:
        try:
            self.source = SourceModel.open(self.job.model)
            self.problems += [f"source `{self.job.model}`: {problem}" for problem in self.source.scale_problems()]
            self.decoder = decoder_of(self.job.quantization, self.source)
        except SourceError as error:
            self.problems += [f"source `{self.job.model}`: {problem}" for problem in error.problems]
        if self.source is None:
            self.problems += _family_problems(self.job.model)

    def look_at_devices(self) -> None:
        try:
            self.pool = DevicePool.resolve(self.job.devices)
        except ValueError as error:
            self.problems.append(str(error))

    def look_at_calibration(self) -> None:
        method = self.job.quantization.method
        if needs_activations(self.job.quantization) and self.job.calibration is None:
            instead = "leave out imatrix" if method == "gguf" else "use method `rtn`, which needs none"
            self.problems.append(
                f"method `{method}` looks at activations and no calibration data is given; name a text, jsonl or parquet "
                f"file or a dataset with --calibration, or {instead}"
            )
        if self.calibration is not None:
            self.problems += source_problems(self.calibration) or content_problems(self.calibration)
            if self.source is not None:
                self.problems += tokenizer_problems(self.calibration, self.source.path)

    def look_at_places(self) -> None:
        try:
            self.root = checkpoint_root(self.job)
        except ValueError as error:
            self.problems.append(str(error))
        source = self.source.path if self.source is not None else Path(self.job.model).expanduser()
        places = {"source": source if os.path.isdir(source) else None, "checkpoint": self.root, "output": self.output}
        self.problems += overlaps({name: path for name, path in places.items() if path is not None})
        for name in ("checkpoint", "output"):
            if (path := places[name]) is not None:
                self.problems += unwritable(name, path)
        self.problems += unnameable(self.output)
        self.problems += occupied(self.output)

    def look_at_shapes(self) -> None:
        """What the layout can't hold, and what it needs that is not installed."""
        if self.source is None:
            return
        scheme, shapes = scheme_of(self.job.quantization, self.source), self._linear_shapes()
        if self.decoder is None:
            self.problems += scheme.problems(shapes)
        else:
            self.problems += ruled_modules.problems(self.job.quantization, self.decoder)
            if self.decoder.quantizes_head:
                self.problems += self._head_problems(self.decoder)
            parts: dict[Scheme, dict[str, tuple[int, int]]] = {}
            for kind in self.decoder.linear_kinds:
                own = parts.setdefault(scheme.of(kind.modules[0]), {})
                own[kind.name] = (kind.out_features, kind.in_features)
            self.problems += dict.fromkeys(problem for part, own in parts.items() for problem in part.problems(own))
        if scheme.scales_layers and self.source.stacking is not None:
            self.problems.append(
                f"method `{self.job.quantization.method}` scales what enters experts and what they hand on; those of "
                f"{self.source.config['model_type']} have biases and a clamp between, which no scale passes; use `gptq`"
            )
        if self.source.stacking is not None and layout_name(self.job.quantization) not in READ_ONE_BY_ONE:
            self.problems.append(
                f"no program is known that reads packed experts of {self.source.config['model_type']} in a "
                f"`{layout_name(self.job.quantization)}` file: transformers and vLLM take them all in one tensor only; use "
                f"`gptq`, `rtn`, `qqq` or `paroquant` in layouts that GPTQModel reads "
                f"({', '.join(f'`{name}`' for name in READ_ONE_BY_ONE)})"
            )
        if self.job.adapter is not None:
            self.problems += adapters.problems(self.job.adapter, self.job.quantization, shapes)

    def _head_problems(self, decoder: Decoder) -> Iterator[str]:
        if decoder.has_tied_head:
            yield (
                f"lm_head: `{decoder.head_name}` is the embedding under another name (tie_word_embeddings), and no loader "
                f"takes the one quantized and the other not; leave out lm_head, or untie them in the source"
            )
        elif ModuleConfigs(self.job.quantization).of(decoder.head_name) is None:
            yield f"lm_head: rules leave `{decoder.head_name}` as it is; leave out lm_head, or the rule that matches it"
        if self.job.adapter is not None:
            yield f"lm_head: adapter `{self.job.adapter.method}` is made for layers only; leave out one of the two"

    def _linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) by name within a layer; of a source that makes no decoder, what its headers tell of matrices."""
        if self.decoder is not None:
            return {kind.name: (kind.out_features, kind.in_features) for kind in self.decoder.linear_kinds}
        found = {}
        for name, info in (self.source.tensors if self.source is not None else {}).items():
            match = LAYER_WEIGHT.fullmatch(name)
            if match and len(info.shape) == 2 and match[1].rpartition(".")[2] not in ROUTERS:
                found[EXPERT_NUMBER.sub(".*.", match[1])] = (info.shape[0], info.shape[1])
        return found

    def plan(self) -> Plan | None:
        """The figures; None where what they are made of has problems."""
        if self.source is None or self.decoder is None or self.pool is None or self.root is None:
            return None
        if self.decoder.quantizes_head and self.decoder.has_tied_head:  # which is in `problems`
            return None
        try:
            scheme = scheme_of(self.job.quantization, self.source)
            if any(scheme.missing_packages()):  # which are in `problems`
                return None
            modules = tuple(self._modules(self.source, self.decoder, scheme))
        except ValueError:  # a shape that the layout can't hold, which is in `problems`
            return None
        of_steps = {name for i in range(self.decoder.step_count) for name in self.decoder.layer_tensor_names(i)}
        outer_names = tuple(
            name
            for name in (*self.decoder.outer_tensor_names, *self.decoder.carried_tensor_names)
            if name not in of_steps
        )
        outer = sum(self.source.stored_bytes(name) for name in outer_names)
        in_layers = sum(self.source.stored_bytes(name) for name in of_steps)
        carried = in_layers - sum(kind.bytes_before for kind in modules)
        samples, tokens = self._calibration_bound()
        continuation = tokens * self.decoder.config.hidden_size * self.decoder.source_dtype.itemsize
        continuation *= streams(self.job.quantization)
        quantized = {full for kind in self.decoder.linear_kinds for full in kind.modules}
        carried_after = scheme.other_bytes(name for name in of_steps if name.rpartition(".")[0] not in quantized)
        outer_after = scheme.other_bytes(outer_names)
        adapter = self._adapter_bytes(self.decoder)
        layers_after = sum(kind.bytes_after for kind in modules) + carried_after + adapter
        estimate = MemoryEstimate(self.job, self.decoder, scheme, self.pool, tokens, self._batch_bound(tokens))
        spills = estimate.spills
        try:
            written = scheme.written_bytes(layers_after, outer_after)
        except ValueError:  # no tokenizer that the file could hold, which is in `problems`
            return None
        return Plan(
            model=self.job.model,
            family=self.source.config["model_type"],
            layer_count=self.decoder.layer_count,
            quantization=self.job.quantization.model_dump(mode="json"),
            summary=scheme.summary(),
            modules=modules,
            carried_bytes=carried,
            carried_bytes_after=carried_after,
            outer_bytes=outer,
            outer_bytes_after=outer_after,
            adapter_bytes=adapter,
            tensor_table=scheme.tensor_table(),
            devices=tuple(str(device) for device in self.pool.devices),
            calibration_samples=samples,
            calibration_tokens=tokens,
            continuation_bytes=continuation,
            samples_bytes=estimate.samples_bytes if estimate.is_chain else 0,
            spills=spills,
            spaces=tuple(self._spaces(self.root, layers_after, written, continuation, spills)),
            memory=estimate.memory(spills=spills),
            notes=tuple(self._notes(self.source, self.decoder, scheme)),
        )

    def tried(self, plan: Plan) -> Plan:
        """The plan with the time that the layers will take."""
        assert self.source is not None and self.decoder is not None and self.pool is not None
        config = self.calibration
        trial = Trial(
            self.decoder,
            scheme_of(self.job.quantization, self.source, self.job.seed),
            self.pool,
            tokens=plan.calibration_tokens,
            batch_tokens=self._batch_bound(plan.calibration_tokens),
            length=0 if config is None else config.concat_size or config.sequence_length,
            rewinds=plan.spills,
            layer_bytes_after=plan.layers_after // plan.layer_count,
        )
        try:
            return replace(plan, time=trial.estimate())
        except Exception as error:  # whatever a trial meets, the run itself may do without it
            note = f"how long it takes can't be told, the trial failed: {error} ({type(error).__name__})"
            return replace(plan, notes=(*plan.notes, note))

    def _modules(self, source: SourceModel, decoder: Decoder, scheme: Scheme) -> Iterator[ModuleKind]:
        """Bytes as they are stored, the bias with its weight."""
        for kind in decoder.linear_kinds:
            before = after = 0
            for full in kind.modules:
                bias = source.tensors.get(f"{full}.bias")
                before += source.stored_bytes(f"{full}.weight") + (bias.size_bytes if bias is not None else 0)
                after += scheme.of(full).module_bytes(full)
            yield ModuleKind(kind.name, kind.out_features, kind.in_features, len(kind.modules), before, after)

    def _adapter_bytes(self, decoder: Decoder) -> int:
        if self.job.adapter is None:
            return 0
        rank, itemsize = self.job.adapter.rank, decoder.source_dtype.itemsize
        return sum(
            peft.packed_bytes(kind.in_features, kind.out_features, rank, itemsize) * len(kind.modules)
            for kind in decoder.linear_kinds
        )

    def _calibration_bound(self) -> tuple[int, int]:
        """Samples and tokens at most, padding included, as far as can be told without reading the data."""
        config = self.calibration
        if config is None:
            return 0, 0
        length = config.concat_size or config.sequence_length
        samples = config.samples
        if not isinstance(config.data, str) and config.concat_size is None:
            samples = min(samples, len(config.data))
        path = file_of(config)
        if path is not None and path.suffix.lower() != ".parquet" and os.path.isfile(path):
            # A token stands for a byte of the file or more, but for special tokens, of which each line may get some.
            samples = min(samples, 1 + 2 * path.stat().st_size // min(length, config.min_length))
            if config.batch_size == 1:
                return samples, min(samples * length, 2 * path.stat().st_size + length)
        return samples, samples * length

    def _batch_bound(self, tokens: int) -> int:
        """Tokens of one batch, padding included, at most."""
        config = self.calibration
        return 0 if config is None else min(tokens, config.batch_size * (config.concat_size or config.sequence_length))

    def _spaces(self, root: Path, layers: int, written: int, continuation: int, spills: bool) -> Iterator[DiskSpace]:
        assert self.decoder is not None
        modules = sum(len(kind.modules) for kind in self.decoder.linear_kinds)
        # One generation more than is kept lies there while the newest is published; layers are shared by all.
        # Spilled hidden states, those that enter a layer and those that leave it, are as large again.
        generations = self.job.checkpoint.keep_last + (3 if spills else 1)
        needed = layers + generations * continuation + modules * RECORD_BYTES_PER_MODULE
        yield space_at("checkpoint", root, needed, bytes_of_objects(root))
        is_finished = os.path.isfile(self.output / REPORT_FILE)
        needed = 0 if is_finished else written + modules * REPORT_BYTES_PER_MODULE
        yield space_at("output", self.output, needed, 0)

    def _notes(self, source: SourceModel, decoder: Decoder, scheme: Scheme) -> Iterator[str]:
        if source.layout is not None:
            yield (
                f"the source is FP8 (`{source.layout.method}`, {len(source.scaled)} weights): they are widened to "
                f"{str(decoder.source_dtype).removeprefix('torch.')} as they are read, and what is left unquantized is "
                f"exported so"
            )
        if mxfp4 := sum(part.stack.scales is not None for part in source.parts.values()):
            yield (
                f"the source is MXFP4 ({mxfp4} weights): they are widened to "
                f"{str(decoder.source_dtype).removeprefix('torch.')} as they are read, and none is exported so"
            )
        if decoder.towers:
            carried = sum(source.tensors[name].size_bytes for name in decoder.carried_tensor_names)
            yield (
                f"this {source.config['model_type']} wraps a text model, which is quantized; "
                f"{', '.join(f'`{tower}`' for tower in decoder.towers)} ({size(carried)}) are carried through as they are"
            )
        own = {scheme.of(kind.modules[0]): None for kind in decoder.linear_kinds}
        yield from dict.fromkeys(note for part in own for note in part.notes())
        yield from ruled_modules.notes(self.job.quantization, decoder)
        if self.job.adapter is not None:
            yield from adapters.notes(self._linear_shapes())
        yield from scheme.layer_notes(decoder)
        if self.job.calibration is not None and self.calibration is None:
            yield f"method `{self.job.quantization.method}` uses no calibration data; what is given is not read"
        context = getattr(decoder.config, "max_position_embeddings", None)
        if self.calibration is not None and isinstance(context, int) and self.calibration.sequence_length > context:
            yield (
                f"sequence_length {self.calibration.sequence_length} is longer than the model's context of {context} tokens"
            )


def _family_problems(model: str) -> list[str]:
    """The family of a source that could not be opened, if its config.json tells one that is not supported."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_bytes())
        reason = refusal(config) if "model_type" in config else None
    except (OSError, ValueError, TypeError, AttributeError):
        return []  # what is wrong with config.json was told when the source was opened
    return [] if reason is None else [f"source `{model}`: {reason}"]


def _memory_problems(memory: Memory, devices: tuple[str, ...], limit: int | None) -> Iterator[str]:
    """Only what is sure to fail: what a device holds at once whatever the calibration."""
    if memory.least_bytes > memory.device_total_bytes:
        held = "the largest layer and its statistics need" if memory.statistics_bytes else "the largest module needs"
        total = size(memory.device_total_bytes)
        if limit is not None and memory.device_total_bytes == limit:
            yield f"{held} {size(memory.least_bytes)} of memory, memory_limit leaves {total}; raise it"
        else:
            yield (
                f"{held} {size(memory.least_bytes)} of memory, {devices[0]} has {total}; use a device with more memory"
            )
