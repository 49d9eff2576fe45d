"""How each method is carried out: which statistics it takes, how it quantizes a weight, which layout holds the result.

Everything else in a run asks here and knows no method by name. A scheme belongs to one config and one source; what can
be told without a source is a function of the config.

Methods come in two kinds. Those that answer `quantizes_units` get a subset's stacked rows in units of a fixed size,
because a subset's linears share one statistic. The others get whole modules in the source's dtype, each on one device.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from tasks.execution_plan import UNIT_ROWS
from tasks.formats import awq as awq_layout
from tasks.formats import bitsandbytes as bitsandbytes_layout
from tasks.formats import compressed_tensors as compressed_tensors_layout
from tasks.formats import exl3 as exl3_layout
from tasks.formats import fp8_block as fp8_layout
from tasks.formats import gptq as gptq_layout
from tasks.formats import paroquant as paroquant_layout
from tasks.formats import qqq as qqq_layout
from tasks.methods import bitsandbytes, fp8, gptaq, gptq, qqq, rtn
from tasks.methods.gptq import ActivationError, HessianError
from tasks.methods.grid import QuantizedRows, check_finite, check_weight
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.module_rules import ModuleConfigs
from tasks.places import copied_files
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    EXL3Config,
    FP8Config,
    GGUFConfig,
    GPTQConfig,
    ParoQuantConfig,
    QQQConfig,
    Quantization,
    RTNConfig,
)

LAYOUTS: dict[str, ModuleType] = {
    "gptq": gptq_layout,
    "awq": awq_layout,
    "qqq": qqq_layout,
    "compressed-tensors": compressed_tensors_layout,
    "fp8": fp8_layout,
    "bitsandbytes": bitsandbytes_layout,
    "exl3": exl3_layout,
    "paroquant": paroquant_layout,
}
# Layouts that GPTQModel reads, which looks for tensors by the names of transformers' modules only. transformers and vLLM
# know these as well as the older ones of wrapped models' files.
BY_OWN_NAMES = ("gptq", "awq", "qqq", "exl3", "paroquant")
# Methods whose statistic is, or is accompanied by, the covariance that an adapter is made from.
COMPENSATED = ("gptq", "awq", "qqq", "paroquant")
# Layouts in which a program reads packed experts of families whose own files stack them.
READ_ONE_BY_ONE = ("gptq", "awq", "qqq", "paroquant")
# An expert that fewer tokens reach is rounded to nearest: a Hessian of so few fits them, and nothing else.
FEWEST_TOKENS = 16
# A K x K Hessian while it is factored: the sum in float32 and its copy in float64 (`tasks.methods.hessian`).
BYTES_PER_HESSIAN_ENTRY = 4 + 8


class Rows(Protocol):
    """A module's quantized weights, as a method makes them and its layout packs them."""

    @property
    def loss(self) -> float: ...


class UnitRows(Rows, Protocol):
    """Some rows of a subset, which are joined, cut into modules and put back into the layer."""

    def rows(self, start: int, stop: int, /) -> "UnitRows": ...

    def dequantize(self) -> Tensor: ...

    @staticmethod
    def concatenate(parts: Any, /) -> "UnitRows": ...


class Statistic(Protocol):
    """What a method sums up over the inputs of a module; lanes are merged in order."""

    tokens: int

    def add(self, x_TK: Tensor, /) -> None: ...

    def merge(self, other: Any, /) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """What a subset's statistic was made into. Without a `state` its modules are quantized without looking at inputs."""

    state: Any
    method: str
    tokens: int = 0
    damp_percent: float | None = None
    fallback: str | None = None
    unscaled: str | None = None


def needs_activations(config: Quantization) -> bool:
    """Whether the method looks at what flows through the layers, which makes the layers a chain."""
    chained = isinstance(config, GPTQConfig | AWQConfig | QQQConfig | EXL3Config | ParoQuantConfig)
    return chained or (isinstance(config, GGUFConfig) and config.imatrix)


def streams(config: Quantization) -> int:
    """How many hidden states of each sample pass through the layers: the quantized model's, and the source's own if asked."""
    return 2 if isinstance(config, GPTQConfig) and config.asymmetry else 1


def packages(config: Quantization) -> tuple[str, ...]:
    """Optional packages whose versions decide the exported bytes."""
    return (config.method,) if isinstance(config, BitsAndBytesConfig | GGUFConfig) else ()


def layout_name(config: Quantization) -> str:
    """Name of the layout that a config is exported in: a key of LAYOUTS, or `gguf`."""
    written: str = getattr(config, "checkpoint_format", config.method)
    return "gptq" if written == "gptq_v2" else written


def pack_dtype(config: Quantization) -> str | None:
    """Dtype of the words in which the layout holds codes; None where it holds none in words."""
    is_packed = isinstance(config, GPTQConfig | RTNConfig | AWQConfig | QQQConfig | ParoQuantConfig)
    return "int32" if is_packed else None


def scheme_of(config: Quantization, source: SourceModel, seed: int = 0) -> "Scheme":
    """The scheme of this config for this source; `seed` is the job's."""
    from tasks.awq_scheme import AWQScheme  # which are built on what is here
    from tasks.exl3_scheme import EXL3Scheme
    from tasks.gguf_scheme import GGUFScheme
    from tasks.paroquant_scheme import ParoQuantScheme

    if isinstance(config, AWQConfig):
        return AWQScheme(config, source)
    if isinstance(config, GGUFConfig):
        return GGUFScheme(config, source)
    if isinstance(config, EXL3Config):
        return EXL3Scheme(config, source, seed)
    if isinstance(config, ParoQuantConfig):
        return ParoQuantScheme(config, source, seed)
    if isinstance(config, QQQConfig):
        return QQQScheme(config, source)
    return GPTQScheme(config, source) if isinstance(config, GPTQConfig) else Scheme(config, source)


def decoder_of(config: Quantization, source: SourceModel) -> Decoder:
    """The source's decoder, in which only what the config's rules quantize, and alike, is taken together."""
    grouping = ModuleConfigs(config).of if getattr(config, "dynamic", ()) else None
    return Decoder.from_source(source, grouping=grouping, quantizes_head=getattr(config, "lm_head", False))


class Scheme:
    """A weight-only method and its layout in safetensors files; the base of the others."""

    quantizes_units = False
    # Whether input channels are scaled, for which a layer is observed before anything of it is quantized.
    scales_layers = False
    is_one_file = False
    # Whether later linears of a layer see the quantized weights of a method that gets whole modules.
    replaces_weights = False
    # Whether later linears of a layer see quantized weights before them, or the layer's own.
    is_sequential = True

    def __init__(self, config: Quantization, source: SourceModel, seed: int = 0) -> None:
        self.config = config
        self.source = source
        self.seed = seed
        self.layout: Any = LAYOUTS.get(layout_name(config))
        self._configs = ModuleConfigs(config)
        self._schemes: dict[Quantization, Scheme] = {config: self}
        # Whoever listens to what a module that takes long is doing, and how well.
        self.tell: Callable[[str, float | None], None] = lambda what, loss: None

    @property
    def needs_activations(self) -> bool:
        return needs_activations(self.config)

    def of(self, module: str) -> "Scheme":
        """The scheme of the module of this full name, which is quantized, by the config's rules."""
        if not getattr(self.config, "dynamic", ()):
            return self
        config = self._configs.of(module)
        if config is None:
            raise ValueError(f"`{module}` is left as it is by the config's rules")
        if config not in self._schemes:
            self._schemes.setdefault(config, scheme_of(config, self.source, self.seed))
        return self._schemes[config]

    # Quantizing

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        raise NotImplementedError(f"method `{self.config.method}` looks at no inputs")

    def statistic_bytes(self, in_features: int) -> int:
        """Most bytes that a subset's statistic takes until it is prepared."""
        return 0

    def sum_bytes(self, in_features: int) -> int:
        """Bytes of the sum over the inputs of a subset, as it waits to be prepared."""
        return 0

    def statistics_bytes(self, in_features: Iterable[int]) -> int:
        """Most bytes of statistics that are alive at once in a layer whose subsets have these widths."""
        return max(map(self.statistic_bytes, in_features))

    def prepare(self, total: Any, all_tokens: int, name: str) -> Prepared:
        """Make the statistic of a subset, of which `name` is a module, into what its modules are quantized with."""
        return Prepared(None, self.config.method)

    def check(self, weight_NK: Tensor) -> None:
        """WeightError for weights that no unit of rows could be quantized from."""

    def quantize_unit(self, weight_NK: Tensor, state: Any) -> UnitRows:
        """Some rows of a subset, on the CPU; HessianError when these can't be quantized with this state."""
        raise NotImplementedError(f"method `{self.config.method}` quantizes whole modules")

    def quantize(self, name: str, weight_NK: Tensor, state: Any) -> Rows:
        """The whole module of this full name, on the CPU; WeightError for weights that can't be quantized."""
        return _on_cpu(WEIGHT_ONLY[self.config.method](weight_NK, self.config))

    # Naming and packing

    def pack(self, name: str, rows: Any, bias: Tensor | None) -> dict[str, Tensor]:
        """A module's tensors under their final names."""
        packed: dict[str, Tensor] = self.layout.pack(name, rows, self.config, bias)
        return packed

    def carry(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a layer that are not quantized, under their final names."""
        return dict(tensors)

    def written(self, decoder: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names that they have in the export: the files', but in wrappers where a reader wants others."""
        by_own = layout_name(self.config) in BY_OWN_NAMES
        return {decoder.own_name(name) if by_own else name: tensor for name, tensor in tensors.items()}

    def quantization_config(self) -> dict[str, Any]:
        """What config.json says about the export."""
        described: dict[str, Any] = self.layout.quantization_config(self.config)
        return described

    def written_beside_weights(self) -> dict[str, Any]:
        """What else of the source than config.json and tensors decides the export's bytes, as plain values."""
        return {}

    @property
    def description_file(self) -> str | None:
        """The file in which the layout's own programs look for `quantization_config`, beside config.json; if any."""
        return getattr(self.layout, "DESCRIPTION_FILE", None)

    def leave_out(self, described: dict[str, Any], modules: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` with modules that are as in the source, for readers that would take them for packed."""
        lists = {
            key: [*(described[key] or ()), *modules]
            for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")
            if modules and key in described
        }
        return described | lists

    # What preflight asks

    def summary(self) -> str:
        """Method and settings in a line."""
        asked = self.config.model_dump(mode="json")
        if asked.get("quant_type") == "int8":
            del asked["double_quant"]  # whose scales are of rows, and never quantized
        settings = [
            _setting(name, value) for name, value in asked.items() if name not in ("method", "checkpoint_format")
        ]
        return ", ".join([asked["method"], *filter(None, settings), f"layout {layout_name(self.config)}"])

    def missing_packages(self) -> Iterator[str]:
        """What the method needs and is not installed, one sentence each."""
        for package in packages(self.config):
            if find_spec(package) is None:
                yield (
                    f"method `{self.config.method}` needs the {package} package, which is not installed; run `pip "
                    f"install 'prefect-quantize[{package}]'`"
                )

    def problems(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        """Why this source can't be exported so: packages, then shapes, one line per complaint with all its modules."""
        yield from self.missing_packages()
        complaints: dict[str, list[str]] = defaultdict(list)
        for name, (out_features, in_features) in shapes.items():
            for problem in self.layout.problems(name, in_features, out_features, self.config):
                complaints[problem.removeprefix(f"`{name}`: ")].append(f"`{name}`")
        for complaint, names in complaints.items():
            layers = "" if any("layer" in name for name in names) else " of every layer"
            yield f"{', '.join(names)}{layers}: {complaint}"
        if len(complaints) > 1 and isinstance(self.config, GPTQConfig | RTNConfig | AWQConfig):
            fitting = [str(size) for size in gptq_layout.LOADABLE_GROUP_SIZES if self._fits(shapes, size)]
            if self._fits(shapes, -1):
                fitting.append("-1")
            if fitting:
                yield f"group sizes that fit all modules: {', '.join(fitting)}"

    def notes(self) -> Iterator[str]:
        """What a reader of the export should know beforehand."""
        config = self.config
        if isinstance(config, GPTQConfig | RTNConfig) and self.layout is gptq_layout:
            grid = f"{config.bits}-bit {'symmetric' if config.sym else 'asymmetric'}"
            if config.bits in (2, 3) or not config.sym:
                yield (
                    f"vLLM loads only 4-bit and 8-bit symmetric gptq files, not this {grid} one; GPTQModel and "
                    f"transformers do"
                )
        if isinstance(config, AWQConfig | RTNConfig) and self.layout is awq_layout:
            yield "transformers loads awq files with the gptqmodel package only; vLLM and GPTQModel read them themselves"
            if config.group_size == 16:
                yield "vLLM has no kernel for awq files with groups of 16; GPTQModel has"
        if isinstance(config, GPTQConfig | RTNConfig | AWQConfig) and self.layout is compressed_tensors_layout:
            fast = compressed_tensors_layout.FAST_GROUP_SIZES
            if config.group_size not in (-1, *fast):
                yield (
                    f"vLLM has no kernel for compressed-tensors files with groups of {config.group_size}, only of "
                    f"{', '.join(map(str, fast))} or -1; transformers reads them"
                )
            if config.bits == 8 and not config.sym:
                yield (
                    "vLLM computes 8-bit asymmetric compressed-tensors files on Hopper GPUs only (its Machete kernel); "
                    "transformers reads them, and symmetric ones are read by both"
                )
        if isinstance(config, FP8Config) and config.fp8_format == "e5m2":
            yield "vLLM takes e5m2 for e4m3 and computes garbage; transformers widens the weights as it loads them"

    def layer_notes(self, decoder: Decoder) -> Iterator[str]:
        """What a user should know beforehand of how the layers are quantized."""
        if not any(".experts." in f".{kind.name}" for kind in decoder.linear_kinds):
            return
        if self.layout is bitsandbytes_layout:
            yield (
                "transformers holds a layer's experts in one tensor and does not load bitsandbytes' (seen in 5.24.0: it "
                "refuses nf4 and fp4, and takes int8 codes for weights); leave them with the rule `-:.*experts`"
            )
        elif self.source.stacking is not None:
            stacks = {name: parts for name, parts in self.source.stacking.projections.items() if len(parts) > 1}
            told = "; ".join(
                f"{' and '.join(f'`{part}`' for part in parts)} are parts of `{name}` by their order in it, as GPTQModel cuts it"
                for name, parts in stacks.items()
            )
            yield (
                f"transformers and vLLM hold a layer's experts in one tensor and have no place for those of "
                f"{layout_name(self.config)} files of this family; GPTQModel does (seen in 7.7.0); {told}"
            )
        elif self.layout in (gptq_layout, awq_layout):
            yield (
                f"transformers holds a layer's experts in one tensor and has no place for those of "
                f"{layout_name(self.config)} files (seen in 5.24.0); vLLM does"
            )

    def module_bytes(self, name: str) -> int:
        """Bytes of a module's packed weight and its bias, by its full name; ValueError where it can't be packed."""
        out_features, in_features = self.source.tensors[f"{name}.weight"].shape
        bias = self.source.tensors.get(f"{name}.bias")
        size: int = self.layout.packed_bytes(in_features, out_features, self.config, bias.size_bytes if bias else 0)
        return size

    def working_bytes(self, out_features: int, in_features: int) -> int:
        """Most bytes beside the weight itself while a whole module is quantized; 0 where the rows come in units."""
        rows = min(out_features, UNIT_ROWS) if self.config.method == "rtn" else out_features
        return rows * in_features * WORKING_BYTES_PER_WEIGHT.get(self.config.method, 0)

    def outer_peak_bytes(self, names: Iterable[str]) -> int:
        """Most bytes while what lies outside the layers is exported: all of it at once."""
        return sum(self.source.tensors[name].size_bytes for name in names)

    def written_bytes(self, layers: int, outer: int) -> int:
        """Bytes of the export's weights with what is copied beside them, given those of its tensors."""
        return layers + outer + sum(path.stat().st_size for path in copied_files(self.source.path, self.is_one_file))

    def other_bytes(self, names: Iterable[str]) -> int:
        """Bytes that tensors which are not quantized have in the export."""
        return sum(self.source.tensors[name].size_bytes for name in names)

    def tensor_table(self) -> str:
        """A line per tensor, where the layout chooses a type for each; else empty."""
        return ""

    def _fits(self, shapes: Mapping[str, tuple[int, int]], group_size: int) -> bool:
        config = self.config.model_copy(update={"group_size": group_size})
        return not any(self.layout.problems(name, k, n, config) for name, (n, k) in shapes.items())


class HessianScheme(Scheme):
    """Hessians, and rows in units; subsets whose Hessian is of no use are rounded to nearest."""

    quantizes_units = True

    def __init__(self, config: GPTQConfig | QQQConfig, factoring: GPTQConfig, source: SourceModel) -> None:
        super().__init__(config, source)
        self.fallback_tokens = config.fallback_tokens
        self.factoring = factoring

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        return gptq.HessianSum(in_features, device)

    def statistic_bytes(self, in_features: int) -> int:
        return in_features**2 * BYTES_PER_HESSIAN_ENTRY

    def sum_bytes(self, in_features: int) -> int:
        return 4 * in_features**2

    def factor(self, total: Any) -> gptq.Factor:
        """What rows are quantized with; the sum is used up."""
        return gptq.factor_hessian(total.hessian(), self.factoring)

    def prepare(self, total: Any, all_tokens: int, name: str) -> Prepared:
        tokens = total.tokens if total is not None else 0
        if tokens < max(FEWEST_TOKENS, self.fallback_tokens * all_tokens):
            return Prepared(None, "rtn", tokens, None, f"{tokens} of {all_tokens} calibration tokens reached it")
        try:
            factor = self.factor(total)
        except HessianError as error:
            return Prepared(None, "rtn", tokens, None, str(error))
        except ActivationError as error:
            raise ActivationError(f"`{name}`: {error}") from error
        return Prepared(factor, self.config.method, tokens, factor.damp_percent)


class GPTQScheme(HessianScheme):
    """An integer grid with float16 scales."""

    def __init__(self, config: GPTQConfig, source: SourceModel) -> None:
        super().__init__(config, config, source)
        self.gptq_config = config
        self.is_sequential = config.true_sequential
        self.compares = bool(config.asymmetry)  # with the source's own hidden states

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        return gptaq.AsymmetricSum(in_features, device) if self.compares else super().statistic(in_features, device)

    def statistic_bytes(self, in_features: int) -> int:
        return super().statistic_bytes(in_features) + (4 * in_features**2 if self.compares else 0)

    def sum_bytes(self, in_features: int) -> int:
        return super().sum_bytes(in_features) * (2 if self.compares else 1)

    def factor(self, total: Any) -> gptq.Factor:
        factor = super().factor(total)
        return gptaq.with_shift(factor, total.cross(), self.gptq_config.asymmetry) if self.compares else factor

    def check(self, weight_NK: Tensor) -> None:
        check_weight(weight_NK, self.gptq_config)

    def quantize_unit(self, weight_NK: Tensor, state: Any) -> UnitRows:
        if state is None:
            return rtn.quantize_rows(weight_NK, self.gptq_config).to("cpu")
        return gptq.quantize_rows(weight_NK, state, self.gptq_config).to("cpu")


class QQQScheme(HessianScheme):
    """Four-bit codes of eight-bit weights."""

    def __init__(self, config: QQQConfig, source: SourceModel) -> None:
        super().__init__(config, qqq.as_gptq(config), source)
        self.qqq_config = config

    def check(self, weight_NK: Tensor) -> None:
        check_finite(weight_NK)

    def quantize_unit(self, weight_NK: Tensor, state: Any) -> UnitRows:
        if state is None:
            return qqq.round_to_nearest(weight_NK, self.qqq_config).to("cpu")
        return qqq.quantize_rows(weight_NK, state, self.qqq_config).to("cpu")

    def notes(self) -> Iterator[str]:
        yield (
            "qqq kernels round each token's activations to 8 bits as they run, and compute in float16: the model's outputs "
            "must not leave its range"
        )


def _rtn_by_units(weight_NK: Tensor, config: RTNConfig) -> QuantizedRows:
    """Rows are independent: a few at a time, so that the largest matrix needs little memory beside itself."""
    check_weight(weight_NK, config)
    return QuantizedRows.concatenate([rtn.quantize_rows(rows, config).to("cpu") for rows in weight_NK.split(UNIT_ROWS)])


# Measured in whole runs (tests/test_memory.py); float32 copies, errors and their checks are most of it.
WORKING_BYTES_PER_WEIGHT = {"rtn": 18, "fp8": 22, "bitsandbytes": 30}
WEIGHT_ONLY: dict[str, Callable[[Tensor, Any], Any]] = {
    "rtn": _rtn_by_units,
    "fp8": fp8.quantize_weight,
    "bitsandbytes": bitsandbytes.quantize_weight,
}


def _on_cpu(rows: Any) -> Any:
    moved = {
        field.name: value.cpu()
        for field in fields(rows)
        if isinstance(value := getattr(rows, field.name), Tensor) and value.device.type != "cpu"
    }
    return replace(rows, **moved) if moved else rows


def _setting(name: str, value: Any) -> str:
    """A setting as a person would say it; empty for one that says nothing."""
    if name == "bits":
        return f"{value:g} bit"
    if name == "group_size":
        return "one group per row" if value == -1 else f"groups of {value}"
    if name == "sym":
        return "symmetric" if value else "asymmetric"
    if name == "granularity":
        return f"one scale per {value}"
    if name == "imatrix":
        return "importance matrix" if value else ""
    if name == "double_quant":
        return "double quantization" if value else ""
    if name == "apply_clip":
        return "clipped" if value else ""
    if name == "lm_head":
        return "with its head" if value else ""
    if name == "dynamic":
        return f"{len(value)} rule{'s' * (len(value) > 1)} for modules" if value else ""
    if name in ("gptaq", "foem") and value:
        return f"{name.upper()} with {', '.join(f'{part} {share:g}' for part, share in value.items())}"
    if name == "true_sequential":
        return "" if value else "layers at once"
    return str(value) if name in ("fp8_format", "quant_type", "codebook") else ""
