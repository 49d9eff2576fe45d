"""Rules for modules by name: which are left as they are, and which are quantized otherwise than the rest.

They mean what `dynamic` means to GPTQModel, vLLM and SGLang, who read them in our exports: a pattern is a regular
expression, matched at the start of a module's full name in the files (`model.layers.0.self_attn.q_proj`); the first rule
that matches decides. `-:` before the pattern leaves the module as it is in the source; `+:`, or nothing, quantizes it
with the rule's settings in place of the config's. These programs write them as a mapping of pattern to settings. We take
that, and hold it as a list: a mapping loses its order in JSON with sorted keys, and in PostgreSQL.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

LEAVE, OVERRIDE = "-:", "+:"
DESCRIPTION = (
    "Rules for modules by name, as GPTQModel's `dynamic`: a regular expression, matched at the start of a module's full "
    "name; the first that matches decides. `-:` before it leaves the modules as they are; otherwise its settings replace "
    "the method's."
)


class SkipRule(BaseModel):
    """Modules that are left as they are in the source."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Rule")
    # Whether a rule may change settings, for methods whose loaders know one kind of module.
    may_override: ClassVar[bool] = False

    pattern: str = Field(
        min_length=1,
        description="Regular expression for the start of modules' full names, such as "
        r"-:model\.layers\.[0-3]\.mlp\.down_proj; -: leaves them as they are.",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_known_settings(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := [str(name) for name in data if name not in cls.model_fields]):
            known = ", ".join(name for name in cls.model_fields if name != "pattern")
            may = f"may give modules {known}, or leave them" if known else "may only leave modules"
            raise ValueError(
                f"rule `{data.get('pattern')}` has {', '.join(unknown)}; rules of this method {may} as they are, with "
                f"`{LEAVE}` before the pattern"
            )
        return data

    @field_validator("pattern")
    @classmethod
    def _is_a_regular_expression(cls, pattern: str) -> str:
        try:
            re.compile(_expression(pattern))
        except re.error as error:
            raise ValueError(f"`{pattern}` is no regular expression: {error}") from error
        if not _expression(pattern):
            raise ValueError(f"`{pattern}` has no expression after its sign; name the modules that it is for")
        return pattern

    @model_validator(mode="after")
    def _says_one_thing(self) -> "SkipRule":
        if self.skips and self.overrides():
            raise ValueError(
                f"rule `{self.pattern}` leaves modules as they are, and gives them {', '.join(self.overrides())}; leave "
                f"out one of the two"
            )
        if not self.skips and not self.may_override:
            raise ValueError(
                f"rule `{self.pattern}` quantizes modules otherwise than the rest, which readers of this method's exports "
                f"don't know; only rules with `{LEAVE}`, which leave modules as they are, are supported here"
            )
        return self

    @property
    def skips(self) -> bool:
        """Whether modules are left as they are."""
        return self.pattern.startswith(LEAVE)

    def matches(self, module: str) -> bool:
        """Whether the rule is for the module of this full name."""
        return re.match(_expression(self.pattern), module) is not None

    def overrides(self) -> dict[str, Any]:
        """The settings that the rule replaces."""
        return {name: value for name, value in self if name != "pattern" and value is not None}


class GridRule(SkipRule):
    """Modules that are left as they are, or rounded to another grid than the rest."""

    may_override: ClassVar[bool] = True

    bits: Literal[2, 3, 4, 8] | None = Field(None, description="Code width.")
    group_size: Annotated[int, Field(ge=-1)] | None = Field(None, description="Input columns per scale.")
    sym: bool | None = Field(None, description="Symmetric grid around zero.")
    mse: float | None = Field(
        None, ge=0.0, allow_inf_nan=False, description="Exponent of the error that a search over grids minimises."
    )


class GPTQRule(GridRule):
    """Modules that are left as they are, or quantized otherwise than the rest."""

    desc_act: bool | None = Field(None, description="Quantize columns by falling activation.")
    act_group_aware: bool | None = Field(None, description="Act-order inside and between whole groups.")
    static_groups: bool | None = Field(None, description="Fix all grids before the first column.")
    damp_percent: float | None = Field(None, gt=0.0, lt=1.0, description="Share of the Hessian's mean diagonal added.")


GGMLType = Literal[
    "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "f16", "f32"
]  # fmt: skip


class GGUFRule(SkipRule):
    """Matrices that get another type than the mix has for them, those outside the layers too."""

    may_override: ClassVar[bool] = True

    quant_type: GGMLType | None = Field(None, description="Type of the matrices; f16 where `-:` leaves them.")

    @property
    def type(self) -> str | None:
        """The type of matrices that match; None for that of the mix."""
        return "f16" if self.skips else self.quant_type


def listed(value: Any) -> Any:
    """Rules as a list, also from a mapping of pattern to settings, and from None."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple({**_settings(pattern, settings), "pattern": pattern} for pattern, settings in value.items())
    return value


AsList = BeforeValidator(listed)


def read(text: str) -> Any:
    """Rules from JSON, or from a file that holds it; ValueError for what is neither."""
    if not text.lstrip().startswith(("{", "[")):
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"neither JSON nor a file that can be read: {error}") from error
    return json.loads(text, object_pairs_hook=_each_once)


class ModuleConfigs:
    """The config of each module: the method's own with the settings of the first rule that matches."""

    def __init__(self, config: Any) -> None:
        self._rules: tuple[SkipRule, ...] = getattr(config, "dynamic", ())
        # The types of a .gguf file are chosen tensor by tensor, by its own plan.
        if any(isinstance(rule, GGUFRule) for rule in self._rules):
            self._rules = ()
        self._base = config.model_copy(update={"dynamic": ()}) if self._rules else config
        self._own = {rule: applied(rule, self._base) for rule in self._rules if not rule.skips}
        self._found: dict[str, Any] = {}

    def of(self, module: str) -> Any:
        """The config of the module of this full name, without rules; None for one that is left as it is."""
        if not self._rules:
            return self._base
        if module not in self._found:
            rule = first(self._rules, module)
            self._found[module] = self._base if rule is None else None if rule.skips else self._own[rule]
        return self._found[module]


def first(rules: tuple[SkipRule, ...], module: str) -> Any:
    """The rule that decides about a module, or None."""
    return next((rule for rule in rules if rule.matches(module)), None)


def without_effect(rules: tuple[SkipRule, ...], names: Iterable[str], kind: str) -> Iterator[str]:
    """Rules that decide about none of these names, and why."""
    names = list(names)
    deciding = {first(rules, name) for name in names}
    for number, rule in enumerate(rules, start=1):
        if rule in deciding and rule not in rules[: number - 1]:
            continue
        matched = [name for name in names if rule.matches(name)]
        if matched:
            yield f"rule `{rule.pattern}` is without effect: earlier rules match all that it matches; put it before them"
        else:
            yield (
                f"rule `{rule.pattern}` matches no {kind}; rules are matched at the start of full names, such as "
                f"`{names[0]}` and `{names[-1]}`"
            )


def applied(rule: SkipRule, config: Any) -> Any:
    """`config`, which has no rules, with the settings of one; ValueError, naming the rule, when that can't be."""
    overrides = rule.overrides()
    data = config.model_dump()
    if overrides.get("desc_act") and "act_group_aware" not in overrides:
        del data["act_group_aware"]  # an order that is asked for replaces the default, as in the config itself
    try:
        return type(config).model_validate(data | overrides)
    except ValidationError as error:
        reasons = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        raise ValueError(f"rule `{rule.pattern}`: {reasons}") from error


def _expression(pattern: str) -> str:
    return pattern.removeprefix(LEAVE) if pattern.startswith(LEAVE) else pattern.removeprefix(OVERRIDE)


def _settings(pattern: Any, settings: Any) -> dict[str, Any]:
    if not isinstance(settings, Mapping) or "pattern" in settings:
        raise ValueError(f"the settings of rule `{pattern}` are {settings!r}; write a mapping such as {{'bits': 8}}")
    return dict(settings)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(f'`{name}`' for name in sorted(twice))} is there twice")
    return dict(pairs)
