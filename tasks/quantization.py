"""The quantization methods, and the adapter, as pydantic models: their options, what goes together, their defaults."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tasks import module_rules
from tasks.module_rules import AsList, GGUFRule, GPTQRule, GridRule, SkipRule

# Asked for by name in other tools; refused by name where a method does not have it as a field. Neutral values pass.
UNSUPPORTED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "true_sequential": ((True, None), "quantizing all modules of a layer from unquantized inputs"),
    "dynamic": ((None, {}, [], ()), "per-module rules and exclusions"),
    "rotation": ((None, ""), "rotation of the weights before quantization"),
    "lm_head": ((False, None), "quantizing the output head"),
    "embeddings": ((False, None), "quantizing the embeddings, which only gguf files have readers for"),
    "gptaq": ((False, None), "GPTAQ, which is an option of gptq"),
    "foem": ((False, None), "FOEM, which is an option of gptq"),
    "preprocessors": ((None, []), "quantization preprocessor chains"),
    "offload_to_disk": ((True, None), "a checkpointed run that keeps everything in memory"),
}


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def without_unsupported(data: Any, supported: Iterable[str], where: str) -> Any:
    """`data` less the options of `UNSUPPORTED_OPTIONS` that are not `supported`, each refused by name unless neutral."""
    if not isinstance(data, dict):
        return data
    unsupported = UNSUPPORTED_OPTIONS.keys() - set(supported)
    refused = [
        f"`{name}` ({meaning})"
        for name, (neutral, meaning) in UNSUPPORTED_OPTIONS.items()
        if name in unsupported and name in data and data[name] not in neutral
    ]
    if refused:
        raise ValueError(f"not supported {where}: {', '.join(refused)}; leave out what is named")
    return {name: value for name, value in data.items() if name not in unsupported}


class _Quantization(Frozen):
    """What every quantization method has; options known elsewhere and not here are refused by their own name."""

    # What the form in Prefect's UI writes on the buttons of the choice.
    model_config = ConfigDict(model_title_generator=lambda model: model.__name__.removesuffix("Config"))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        method = cls.model_fields["method"].default if "method" in cls.model_fields else "any"
        return without_unsupported(data, cls.model_fields, f"by method `{method}`")


class _Grid(_Quantization):
    """The integer grid and the file layout of GPTQ and RTN."""

    bits: Literal[2, 3, 4, 8] = Field(4, description="Code width.")
    group_size: Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] = Field(
        128, description="Input columns per scale; -1 is one scale per output channel."
    )
    sym: bool = Field(True, description="Symmetric grid around zero; otherwise each group has its own zero point.")
    mse: float = Field(
        0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Exponent of the error that a search over shrunken grids minimises; 0 takes the full range.",
    )

    @model_validator(mode="after")
    def _group_size_is_a_size(self) -> "_Grid":
        if self.group_size == 0:
            raise ValueError("group_size 0 is not a size; use -1 for one scale per output channel")
        return self

    @model_validator(mode="after")
    def _head_has_readers(self) -> "_Grid":
        layout = getattr(self, "checkpoint_format", "gptq")
        if getattr(self, "lm_head", False) and layout not in ("gptq", "gptq_v2"):
            raise ValueError(
                f"lm_head: checkpoint_format `{layout}` has no readers for a quantized head; use `gptq` or `gptq_v2`"
            )
        return self

    @model_validator(mode="after")
    def _rules_can_be_applied(self) -> "_Grid":
        if rules := getattr(self, "dynamic", ()):
            plain = self.model_copy(update={"dynamic": ()})
            for rule in rules:
                module_rules.applied(rule, plain)
                if rule.overrides() and getattr(self, "checkpoint_format", "") == "awq":
                    raise ValueError(
                        f"rule `{rule.pattern}`: readers of checkpoint_format `awq` take one grid for all modules; leave "
                        f"modules as they are with `-:`, or use checkpoint_format `gptq` or `compressed-tensors`"
                    )
        return self


class GPTAQConfig(Frozen):
    """Outputs are matched to those of the unquantized model, not of its weights on the quantized one's inputs (arXiv 2504.02692)."""

    alpha: float = Field(
        0.25,
        ge=0.0,
        le=1.0,
        description="Share of what the inputs differ by that later columns take up; 0 is GPTQ.",
    )


class FOEMConfig(Frozen):
    """The first-order term of the loss, which GPTQ takes for zero, is compensated too (arXiv 2507.11017)."""

    alpha: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="As GPTAQ's: share of what the inputs differ by that later columns take up; 0 is without.",
    )
    beta: float = Field(
        0.2,
        ge=0.0,
        le=1.0,
        description="Share of a column's way from the source's weights that is taken back before it is rounded.",
    )


def _switched(value: Any) -> Any:
    """True stands for an option's defaults, False for doing without it."""
    return {} if value is True else None if value is False else value


class GPTQConfig(_Grid):
    """GPTQ: columns are rounded one by one, each error spread over the columns that follow (arXiv 2210.17323)."""

    method: Literal["gptq"] = Field("gptq", description="GPTQ, which needs calibration data.")
    desc_act: bool = Field(False, description="Quantize columns by falling activation (act-order).")
    act_group_aware: bool = Field(
        True,
        description="Act-order inside and between whole groups, undone at the end: loads as fast as without. "
        "Off where desc_act is asked for.",
    )
    static_groups: bool = Field(False, description="Fix all grids from the original weights before the first column.")
    true_sequential: bool = Field(
        True,
        description="Modules see what the layer's quantized modules before them make; otherwise what the layer's own "
        "weights make, and the next layer sees the quantized ones.",
    )
    gptaq: Annotated[GPTAQConfig | None, BeforeValidator(_switched)] = Field(
        None,
        description="GPTAQ: match the outputs that the unquantized model gives; its hidden states are computed beside the "
        "quantized one's, which takes about twice the time and memory of the forward.",
    )
    foem: Annotated[FOEMConfig | None, BeforeValidator(_switched)] = Field(
        None, description="FOEM: compensate the first-order term of the loss; with `alpha`, GPTAQ's difference too."
    )
    block_size: int = Field(128, ge=1, description="Columns between lazy updates of the rest.")
    damp_percent: float = Field(
        0.05,
        gt=0.0,
        lt=1.0,
        description="Share of the Hessian's mean diagonal added to it; raised when it won't factor.",
    )
    damp_increment: float = Field(
        0.01, gt=0.0, lt=1.0, description="First step by which damping is raised; it doubles."
    )
    fallback_tokens: float = Field(
        0.005,
        ge=0.0,
        allow_inf_nan=False,
        description="Modules that saw fewer calibration tokens than this share of all, or than 16, are rounded to nearest "
        "instead.",
    )
    lm_head: bool = Field(
        False, description="Quantize the output head too, by the method's settings or those of a rule that matches it."
    )
    dynamic: Annotated[tuple[GPTQRule, ...], AsList] = Field((), description=module_rules.DESCRIPTION)
    checkpoint_format: Literal["gptq", "gptq_v2", "compressed-tensors"] = Field(
        "gptq",
        description="Layout of the export: `gptq` stores zero points minus one, `gptq_v2` as they are; "
        "`compressed-tensors` (4 and 8 bits) is what vLLM and transformers read without a package for GPTQ.",
    )

    @model_validator(mode="before")
    @classmethod
    def _asked_order_replaces_the_default(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("desc_act"):
            return {"act_group_aware": False, **data}
        return data

    @model_validator(mode="after")
    def _one_order(self) -> "GPTQConfig":
        if self.desc_act and self.act_group_aware:
            raise ValueError("desc_act and act_group_aware are two orders of one thing; choose one")
        return self

    @model_validator(mode="after")
    def _one_asymmetry(self) -> "GPTQConfig":
        if self.gptaq is not None and self.foem is not None:
            raise ValueError(
                "gptaq and foem are two settings of one alpha; for both at once leave out gptaq, and give foem its alpha"
            )
        return self

    @property
    def asymmetry(self) -> float:
        """GPTAQ's alpha, from wherever it is set; with 0 no hidden states of the unquantized model are needed."""
        return self.gptaq.alpha if self.gptaq is not None else self.foem.alpha if self.foem is not None else 0.0

    @property
    def first_order(self) -> float:
        """FOEM's beta; 0 is GPTQ."""
        return self.foem.beta if self.foem is not None else 0.0


class QQQConfig(_Quantization):
    """QQQ: 4-bit codes that stand for 8-bit weights, for kernels that round activations to 8 bits (arXiv 2406.09904)."""

    method: Literal["qqq"] = Field("qqq", description="QQQ, which needs calibration data.")
    bits: Literal[4] = Field(4, description="Code width.")
    group_size: Literal[-1, 128] = Field(
        128, description="Input columns per scale; -1 is one scale per output channel."
    )
    mse: float = Field(
        0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Exponent of the error that a search over shrunken grids minimises; 0 takes the full range.",
    )
    act_group_aware: bool = Field(
        True,
        description="Act-order inside and between whole groups, undone at the end: loads as fast as without. "
        "Off where desc_act is asked for.",
    )
    block_size: int = Field(128, ge=1, description="Columns between lazy updates of the rest.")
    damp_percent: float = Field(
        0.005,
        gt=0.0,
        lt=1.0,
        description="Share of the Hessian's mean diagonal added to it; raised when it won't factor.",
    )
    damp_increment: float = Field(
        0.01, gt=0.0, lt=1.0, description="First step by which damping is raised; it doubles."
    )
    fallback_tokens: float = Field(
        0.005,
        ge=0.0,
        allow_inf_nan=False,
        description="Modules that saw fewer calibration tokens than this share of all, or than 16, are rounded to nearest "
        "instead.",
    )


class RTNConfig(_Grid):
    """Round to nearest: no calibration, no chain between layers."""

    method: Literal["rtn"] = Field("rtn", description="Round to nearest, without calibration data.")
    lm_head: bool = Field(
        False, description="Quantize the output head too, by the method's settings or those of a rule that matches it."
    )
    dynamic: Annotated[tuple[GridRule, ...], AsList] = Field((), description=module_rules.DESCRIPTION)
    checkpoint_format: Literal["gptq", "gptq_v2", "compressed-tensors", "awq"] = Field(
        "gptq",
        description="Layout of the export, as for gptq; or `awq` (4 bits), the gemm layout of AWQ.",
    )


class AWQConfig(_Quantization):
    """AWQ: input channels that matter are scaled up before rounding, what precedes them down (arXiv 2306.00978)."""

    # The search over clipped ranges below looks at the inputs; the grid's own, which doesn't, is for other methods.
    mse: ClassVar[float] = 0.0

    method: Literal["awq"] = Field("awq", description="AWQ, which needs calibration data.")
    bits: Literal[4, 8] = Field(4, description="Code width; layout awq holds 4.")
    group_size: Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] = Field(
        128, description="Input columns per scale; -1 is one scale per output channel."
    )
    sym: bool = Field(False, description="Symmetric grid around zero; otherwise each group has its own zero point.")
    n_grid: int = Field(20, ge=1, description="Exponents from 0 to 1 that the search for channel scales tries.")
    duo_scaling: bool = Field(
        True, description="Try scales that are divided by the weights' magnitude too, not the inputs' alone."
    )
    apply_clip: bool = Field(
        True, description="Clip each group of weights to the range with the least error of the output."
    )
    fallback_tokens: float = Field(
        0.005,
        ge=0.0,
        allow_inf_nan=False,
        description="Modules that saw fewer calibration tokens than this share of all are rounded to nearest instead.",
    )
    dynamic: Annotated[tuple[SkipRule, ...], AsList] = Field((), description=module_rules.DESCRIPTION)
    checkpoint_format: Literal["awq", "compressed-tensors"] = Field(
        "awq", description="Layout of the export: `awq` (gemm), or `compressed-tensors` (4 and 8 bits)."
    )

    @model_validator(mode="after")
    def _fits_the_layout(self) -> "AWQConfig":
        if self.group_size == 0:
            raise ValueError("group_size 0 is not a size; use -1 for one scale per output channel")
        if self.bits != 4 and self.checkpoint_format == "awq":
            raise ValueError(
                f"checkpoint_format `awq` holds 4 bits, not {self.bits}; use checkpoint_format `compressed-tensors`"
            )
        return self


class ParoQuantConfig(_Quantization):
    """ParoQuant: channels are scaled and turned in pairs, by angles that are learnt (arXiv 2511.10645)."""

    method: Literal["paroquant"] = Field("paroquant", description="ParoQuant, which needs calibration data.")
    bits: Literal[4] = Field(4, description="Code width.")
    group_size: Literal[64, 128] = Field(128, description="Input columns per scale, and that are turned together.")
    rotation_epochs: int = Field(10, ge=0, description="Passes over the sample that learn channel scales and angles.")
    finetune_epochs: int = Field(10, ge=0, description="Passes over the sample that learn weights and their grid.")
    rotation_lr: float = Field(
        0.05, gt=0.0, allow_inf_nan=False, description="First learning rate of channel scales and angles."
    )
    weight_lr: float = Field(1e-5, gt=0.0, allow_inf_nan=False, description="First learning rate of weights.")
    quantizer_lr: float = Field(
        1e-6, gt=0.0, allow_inf_nan=False, description="First learning rate of the grid's scales and zero points."
    )
    train_samples: int = Field(2048, ge=1, description="Tokens of a module's inputs to learn from, at most.")
    validation_samples: int = Field(64, ge=1, description="Tokens that choose the best state, beside those.")
    train_batch_size: int = Field(64, ge=1, description="Tokens per step of learning.")


class FP8Config(_Quantization):
    """Eight-bit floats with a scale per tensor, row or block: no calibration, no chain between layers."""

    method: Literal["fp8"] = Field("fp8", description="Eight-bit floats, without calibration data.")
    fp8_format: Literal["e4m3", "e5m2"] = Field(
        "e4m3", description="Bits of exponent and mantissa: e4m3 is finer, e5m2 reaches farther."
    )
    granularity: Literal["tensor", "row", "block"] = Field(
        "row", description="What shares a scale: a whole matrix, an output channel, or a block of 128 x 128 weights."
    )
    dynamic: Annotated[tuple[SkipRule, ...], AsList] = Field((), description=module_rules.DESCRIPTION)
    checkpoint_format: Literal["compressed-tensors", "fp8"] = Field(
        "compressed-tensors",
        description="Layout of the export: `compressed-tensors` (float-quantized), or `fp8`, the fine-grained layout of "
        "transformers.",
    )

    @model_validator(mode="after")
    def _has_a_reader(self) -> "FP8Config":
        if self.fp8_format == "e5m2" and self.checkpoint_format == "compressed-tensors":
            raise ValueError(
                "fp8_format e5m2 can't be written as compressed-tensors: its readers take every float8 weight for e4m3 "
                "and compute garbage without an error; use checkpoint_format `fp8`, or e4m3"
            )
        if self.fp8_format == "e4m3" and self.checkpoint_format == "fp8" and self.granularity != "block":
            raise ValueError(
                f"checkpoint_format `fp8` holds e4m3 in blocks of 128 x 128 only, not per {self.granularity}; "
                f"use granularity `block`, or checkpoint_format `compressed-tensors`"
            )
        return self


class BitsAndBytesConfig(_Quantization):
    """bitsandbytes' own 4-bit and 8-bit codes: no calibration, no chain between layers."""

    method: Literal["bitsandbytes"] = Field(
        "bitsandbytes", description="bitsandbytes' codes, without calibration data; needs the extra `bitsandbytes`."
    )
    quant_type: Literal["nf4", "fp4", "int8"] = Field(
        "nf4",
        description="Codes: nf4 (quantiles of a normal distribution) and fp4 in blocks of 64 weights, int8 per output "
        "channel.",
    )
    double_quant: bool = Field(
        True, description="Quantize the scales of nf4 and fp4 blocks too: 4.13 instead of 4.5 bits per weight."
    )
    compute_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "bfloat16", description="What a reader multiplies nf4 and fp4 weights in; it does not change the weights."
    )
    dynamic: Annotated[tuple[SkipRule, ...], AsList] = Field((), description=module_rules.DESCRIPTION)


class EoRAConfig(Frozen):
    """A low-rank adapter beside the weights that takes back most of what quantization did (EoRA, arXiv 2410.21271)."""

    method: Literal["eora"] = Field("eora", description="Low-rank adapter in peft's layout, beside the weights.")
    rank: int = Field(32, ge=1, description="Columns of the adapter's matrices.")


GGUFType = Literal[
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_k_s", "q4_k_m", "q5_0", "q5_k_s", "q5_k_m", "q6_k", "q8_0"
]  # fmt: skip


class GGUFConfig(_Quantization):
    """GGML blocks in one .gguf file for llama.cpp and its kin: no chain between layers, calibration only for imatrix."""

    method: Literal["gguf"] = Field("gguf", description="A .gguf file; calibration data only for an importance matrix.")
    quant_type: GGUFType = Field(
        "q4_k_m", description="Type of most tensors; the mixes (_s, _m, _l) give sensitive tensors more bits."
    )
    strict: bool = Field(
        False,
        description="Refuse a model with rows that the intended blocks do not fill, instead of a larger type for them.",
    )
    imatrix: bool = Field(
        False,
        description="Weigh each weight's error by the mean square of its input column over the calibration tokens.",
    )
    dynamic: Annotated[tuple[GGUFRule, ...], AsList] = Field((), description=module_rules.DESCRIPTION)


class EXL3Config(_Quantization):
    """EXL3: weights made Gaussian by Hadamard matrices, then coded by a trellis (QTIP, arXiv 2406.11235)."""

    method: Literal["exl3"] = Field("exl3", description="EXL3, which needs calibration data.")
    bits: float = Field(
        3.0,
        ge=2.0,
        le=8.0,
        allow_inf_nan=False,
        description="Mean bits per weight; between whole widths, some modules get the lower one and some the higher.",
    )
    codebook: Literal["mcg", "mul1", "3inst"] = Field(
        "mcg", description="How values are computed from codes; 3inst is the first of exllamav3's, mcg its usual one."
    )
    out_scales: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether output channels get scales; `auto`: unless few input channels carry the activations.",
    )
    compiled: bool = Field(
        False,
        description="Search on CPUs with code made by torch.compile, about twice as fast up to 5 bits; needs a C++ compiler.",
    )
    sigma_reg: float = Field(
        0.025, gt=0.0, lt=1.0, description="Share of the Hessian's mean diagonal added to it before it is factored."
    )


# Prefect's form shows a value as the first alternative that has all of its fields: what has fewer stands before what has
# the same and more.
Quantization = Annotated[
    RTNConfig
    | QQQConfig
    | GPTQConfig
    | AWQConfig
    | FP8Config
    | BitsAndBytesConfig
    | GGUFConfig
    | EXL3Config
    | ParoQuantConfig,
    Field(discriminator="method"),
]
