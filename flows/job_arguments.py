"""The job's options on the command line: made from the job's own models, so that names, defaults and help are written once."""

import argparse
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from checkpoint_store.config import CheckpointConfig
from tasks import module_rules
from tasks.job import CalibrationConfig, QuantizationJob, TelemetryConfig
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    EoRAConfig,
    EXL3Config,
    FOEMConfig,
    FP8Config,
    GGUFConfig,
    GPTAQConfig,
    GPTQConfig,
    ParoQuantConfig,
    QQQConfig,
    RTNConfig,
)

METHODS: dict[str, type[BaseModel]] = {
    "gptq": GPTQConfig,
    "rtn": RTNConfig,
    "awq": AWQConfig,
    "qqq": QQQConfig,
    "fp8": FP8Config,
    "bitsandbytes": BitsAndBytesConfig,
    "gguf": GGUFConfig,
    "exl3": EXL3Config,
    "paroquant": ParoQuantConfig,
}
SECTIONS: dict[str, type[BaseModel]] = {
    "adapter": EoRAConfig,
    "calibration": CalibrationConfig,
    "checkpoint": CheckpointConfig,
    "telemetry": TelemetryConfig,
}
# Options of a method that have settings of their own: a flag, and one more for each setting, which needs no flag beside it.
SWITCHES: dict[str, type[BaseModel]] = {"gptaq": GPTAQConfig, "foem": FOEMConfig}

# Where a field's option is not simply the field's name.
OPTION_NAMES = {
    ("quantization", "checkpoint_format"): "--format",
    ("quantization.gptaq", "alpha"): "--gptaq-alpha",
    ("quantization.foem", "alpha"): "--foem-alpha",
    ("quantization.foem", "beta"): "--foem-beta",
    ("adapter", "method"): "--adapter",
    ("adapter", "rank"): "--adapter-rank",
    ("calibration", "data"): "--calibration",
    ("calibration", "name"): "--dataset-name",
    ("checkpoint", "path"): "--checkpoint",
    ("telemetry", "device"): "--telemetry",
}
FLAGS_WITH_OPPOSITE = {
    "sym": ("--sym", "--asym"),
    "double_quant": ("--double-quant", "--no-double-quant"),
    "duo_scaling": ("--duo-scaling", "--no-duo-scaling"),
    "apply_clip": ("--apply-clip", "--no-apply-clip"),
    "act_group_aware": ("--act-group-aware", "--no-act-group-aware"),
    "time_estimate": ("", "--no-time-estimate"),
    "true_sequential": ("", "--no-true-sequential"),
    "strict_device_check": ("", "--no-strict-device-check"),
}
SHOWN_IN_HELP = {
    "data": "FILE",
    "path": "ROOT",
    "output": "DIR",
    "offload_directory": "DIR",
    "devices": "LIST",
    "memory_limit": "SIZE",
    "hidden_states_limit": "SIZE",
    "dynamic": "RULES",
}
SHOWN_FOR_TYPE: dict[Callable[[str], Any], str] = {int: "N", float: "X"}


class UsageError(ValueError):
    """The command line can't be made into a job; the message names the option and what it may be."""


class _Option(NamedTuple):
    section: str  # part of the job, "" for the job itself
    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return OPTION_NAMES.get((self.section, self.name), f"--{self.name.replace('_', '-')}")

    @property
    def destination(self) -> str:
        return f"{self.section}.{self.name}"


def add_job_arguments(parser: argparse.ArgumentParser, *, output_required: bool = True) -> None:
    """Everything that describes a job: `MODEL`, and one option per field, absent from the result unless given."""
    parser.add_argument("model", metavar="MODEL", help=_help(QuantizationJob.model_fields["model"]))
    parser.add_argument(
        "--output", metavar="DIR", required=output_required, help=_help(QuantizationJob.model_fields["output"])
    )
    parser.add_argument("--method", choices=sorted(METHODS), default="gptq", help="Quantization method. (default gptq)")
    groups: dict[str, Any] = {}
    for option in _options():
        section = option.section.partition(".")[0]
        group = groups.get(section) or groups.setdefault(section, parser.add_argument_group(section or "run"))
        _add(group, option)


def job_from(arguments: argparse.Namespace) -> QuantizationJob:
    """The job that these arguments describe; raises `UsageError` naming each option that can't be."""
    sections: dict[str, dict[str, Any]] = {"": {}, "quantization": {"method": arguments.method}}
    for option in _options():
        if not hasattr(arguments, option.destination):
            continue
        place, _, switch = option.section.partition(".")
        if switch and not isinstance(sections[place].get(switch), dict):
            sections[place][switch] = {}
        fields = sections[place][switch] if switch else sections.setdefault(place, {})
        fields[option.name] = getattr(arguments, option.destination)
    job = sections.pop("") | sections
    if "calibration" in job and "data" not in job["calibration"]:
        given = ", ".join(
            option.flag
            for option in _options()
            if option.section == "calibration" and option.name in job["calibration"]
        )
        raise UsageError(f"{given} says how to read calibration data, and none is given; name it with --calibration")
    job |= {"model": arguments.model, "output": arguments.output}
    try:
        return QuantizationJob.model_validate(job)
    except ValidationError as error:
        raise UsageError("\n".join(_problems(error, arguments.method))) from error


def _options() -> Iterator[_Option]:
    fields: dict[str, dict[str, FieldInfo]] = defaultdict(dict)
    for method, model in METHODS.items():
        for name, field in model.model_fields.items():
            if name != "method":
                fields[name][method] = field
    for name, by_method in fields.items():
        yield _Option("quantization", name, _merged(by_method))
        if name in SWITCHES:
            for part, field in SWITCHES[name].model_fields.items():
                yield _Option(f"quantization.{name}", part, field)
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            yield _Option(section, name, field)
    for name in ("devices", "memory_limit", "hidden_states_limit", "time_estimate", "offload_directory", "seed"):
        yield _Option("", name, QuantizationJob.model_fields[name])


def _merged(by_method: Mapping[str, FieldInfo]) -> FieldInfo:
    """One field for the command line of what several methods call by one name; the job's model knows which is which."""
    first, *others = by_method.values()
    if all((field.description, field.default) == (first.description, first.default) for field in others):
        return first
    is_any_number = any(field.annotation is float for field in by_method.values())
    told: dict[str, list[str]] = defaultdict(list)
    for method, field in by_method.items():
        told[f"{field.description} (default {field.default})"].append(method)
    description = " ".join(f"{', '.join(methods)}: {text}" for text, methods in told.items())
    if is_any_number:
        return FieldInfo(annotation=int | float, description=description)
    if get_origin(first.annotation) is not Literal:
        return FieldInfo(annotation=first.annotation, description=description)
    values = dict.fromkeys(value for field in by_method.values() for value in get_args(field.annotation))
    return FieldInfo(annotation=Literal[tuple(values)], description=description)


def _add(group: "argparse._ArgumentGroup", option: _Option) -> None:
    common: dict[str, Any] = {"dest": option.destination, "default": argparse.SUPPRESS}
    if option.field.annotation is bool:
        on, off = FLAGS_WITH_OPPOSITE.get(option.name, (option.flag, ""))
        if on:
            group.add_argument(on, action="store_true", help=_help(option.field), **common)
        if off:
            group.add_argument(
                off,
                action="store_false",
                help=f"The opposite of --{option.name.replace('_', '-')}"
                if on
                else f"Switches this off: {_help(option.field)}",
                **common,
            )
        return
    if option.name in SWITCHES:
        group.add_argument(option.flag, action="store_true", help=_help(option.field), **common)
        return
    choices, kind = (None, rules) if option.name == "dynamic" else _values(option.field.annotation)
    shown = (
        None
        if choices
        else SHOWN_IN_HELP.get(option.name, "X" if kind is number else SHOWN_FOR_TYPE.get(kind, option.name.upper()))
    )
    group.add_argument(option.flag, type=kind, choices=choices, metavar=shown, help=_help(option.field), **common)


def _values(annotation: Any) -> tuple[tuple[Any, ...] | None, Callable[[str], Any]]:
    """Choices, if they are few, and the type that text is turned into."""
    if get_origin(annotation) is Literal:
        return get_args(annotation), type(get_args(annotation)[0])
    if annotation == int | float:
        return None, number
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _values(parts[0]) if len(parts) == 1 else (None, str)
    return None, annotation if annotation in (int, float) else str


def number(text: str) -> int | float:
    """4 is whole, and 4.0 is not: some methods know whole widths only. The name is what argparse calls a wrong one."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def rules(text: str) -> Any:
    """Rules for modules, as JSON or from a file."""
    try:
        return module_rules.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be read: {error}") from error


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.is_required() or field.default in (None, ()) or field.annotation is bool:
        return text
    return f"{text} (default {field.default})"


def _problems(error: ValidationError, method: str) -> Iterator[str]:
    flags = {(option.section, option.name): option.flag for option in _options()}
    for problem in error.errors():
        where = [str(part) for part in problem["loc"] if part not in METHODS]
        section, name = ("", where[0]) if len(where) == 1 else (where[0], where[1]) if where else ("", "")
        flag = flags.get((section, name), ".".join(where))
        message = problem["msg"].removeprefix("Value error, ")
        inside = where[2:]
        if inside and name in SWITCHES:
            flag, inside = flags.get((f"{section}.{name}", inside[0]), flag), []
        if inside:  # of a list of rules
            flag = f"{flag} {'.'.join(inside)}"
        if problem["type"] == "extra_forbidden" and not inside:
            yield f"{flag} does not apply to method `{method}`; leave it out"
        elif problem["type"] == "value_error":
            yield f"{flag}: {message}" if (section, name) in flags else message
        else:
            yield f"{flag} {problem['input']}: {message}"
