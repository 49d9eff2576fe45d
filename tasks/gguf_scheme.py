"""How a model becomes one .gguf file: every tensor has a planned type, a layer's object holds its block bytes.

Layers are encoded under the file's own names as they are quantized; what lies outside them (embeddings, norm, head) when
the file is put together. With an importance matrix the layers are run, unquantized, for what enters each linear.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from tasks.formats import gguf
from tasks.formats.gguf_families import (
    context_length,
    family_of,
    head_size,
    lost_in_transformers,
    rope_parameters,
    rotated_columns,
    window_of,
)
from tasks.formats.gguf_plan import GGUFPlan, TensorPlan, make_plan
from tasks.formats.gguf_tokenizer import TokenizerFields, tokenizer_fields
from tasks.methods.ggml import CHUNK_WEIGHTS
from tasks.methods.grid import WeightError
from tasks.methods.importance import ImportanceSum
from tasks.models.families import WRAPPERS
from tasks.models.source import SourceModel
from tasks.models.tensor_check import DERIVABLE
from tasks.quantization import GGUFConfig
from tasks.schemes import Prepared, Scheme, Statistic

# Measured; the search of K-quants keeps a few dozen float32 values for each weight of a chunk.
WORKING_BYTES_PER_CHUNK_WEIGHT = 70


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """A whole tensor as the file holds it, and its mean squared error."""

    encoded: Tensor
    loss: float


class GGUFScheme(Scheme):
    """GGML blocks by plan; importance from calibration where it is asked for."""

    is_one_file = True

    def __init__(self, config: GGUFConfig, source: SourceModel) -> None:
        super().__init__(config, source)
        self.gguf_config = config

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """config.json with what transformers takes for granted where it says nothing."""
        try:
            return AutoConfig.for_model(**self.source.config).to_dict() | {
                "model_type": self.source.config["model_type"]
            }
        except Exception:  # config.json is the user's; that transformers does not take it is told by the decoder
            return self.source.config

    @cached_property
    def plan(self) -> GGUFPlan:
        """The types of all tensors; ValueError with every problem."""
        is_tied = bool(self.source.config.get("tie_word_embeddings"))
        shapes = {
            name: info.shape
            for name, info in self.source.tensors.items()
            if not (is_tied and name == "lm_head.weight") and not name.endswith(DERIVABLE)
        }
        return make_plan(self.gguf_config, self.model_config, shapes)

    @cached_property
    def entries(self) -> dict[str, TensorPlan]:
        """The plan by the source's names."""
        return {entry.source: entry for entry in self.plan.tensors if entry.source is not None}

    def tokenizer(self) -> TokenizerFields:
        """What the file says of the tokenizer; ValueError when the source has none, or one that readers don't know."""
        files = {name: self.source.path / f"{name}.json" for name in ("tokenizer", "tokenizer_config")}
        missing = [path.name for path in files.values() if not path.is_file()]
        if missing:
            raise ValueError(f"the source has no {' and no '.join(missing)}, and a .gguf file holds its tokenizer")
        parsed = {name: _json_object(path) for name, path in files.items()}
        template = self.source.path / "chat_template.jinja"
        vocabulary = self.source.tensors["model.embed_tokens.weight"].shape[0]
        return tokenizer_fields(
            parsed["tokenizer"],
            parsed["tokenizer_config"],
            self.source.config,
            vocabulary,
            template.read_text() if template.is_file() else None,
        )

    # Quantizing

    def statistic(self, in_features: int, device: torch.device) -> Statistic:
        return ImportanceSum(in_features, device)

    def statistic_bytes(self, in_features: int) -> int:
        return 8 * in_features if self.gguf_config.imatrix else 0

    def sum_bytes(self, in_features: int) -> int:
        return self.statistic_bytes(in_features)

    def prepare(self, total: Any, all_tokens: int, name: str) -> Prepared:
        if not self.gguf_config.imatrix:
            return Prepared(None, "gguf")
        if total is None or not total.tokens:
            return Prepared(None, "gguf", 0, None, f"0 of {all_tokens} calibration tokens reached it")
        importance_K = total.importance()
        if not bool(importance_K.isfinite().all()):
            raise ValueError(f"`{name}`: its inputs hold NaN or Inf: the source's weights are damaged, or overflow")
        return Prepared(importance_K, "gguf", total.tokens)

    def quantize(self, name: str, weight_NK: Tensor, state: Any) -> EncodedTensor:
        entry = self.entries[f"{name}.weight"]
        encoded, losses_N = gguf.encode(entry, weight_NK, state)
        loss = float(losses_N.double().mean())
        # Bytes can't be scanned for NaN later; the error of what they decode to can.
        if not loss < float("inf"):
            raise WeightError(f"encoded as {entry.actual} it holds values that are not finite; the source is damaged")
        return EncodedTensor(gguf.arrange(entry, encoded).cpu(), loss)

    # Naming and packing

    def pack(self, name: str, rows: Any, bias: Tensor | None) -> dict[str, Tensor]:
        packed = {self.entries[f"{name}.weight"].name: rows.encoded}
        return packed if bias is None else packed | self.carry({f"{name}.bias": bias})

    def carry(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return gguf.encode_all(tuple(self.entries[name] for name in tensors), tensors)[0]

    def quantization_config(self) -> dict[str, Any]:
        return {"quant_method": "gguf", "quant_type": self.gguf_config.quant_type}

    def written_beside_weights(self) -> dict[str, Any]:
        return {"tokenizer": asdict(self.tokenizer())}

    # What preflight asks

    def problems(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        if self.source.config.get("model_type") in WRAPPERS:
            yield (
                f"a .gguf file holds a text model alone, and this {self.source.config['model_type']!r} wraps one, whose names "
                f"and configuration are not told apart here; use another method, or a text model"
            )
            return
        found = gguf.problems(self.model_config)
        yield from found
        if found:
            return
        for look in (lambda: self.plan, self.tokenizer):
            try:
                look()
            except ValueError as error:
                yield str(error)
            except KeyError as error:
                yield f"the tokenizer's files or the source lack {error}"
            except (TypeError, AttributeError) as error:
                yield f"config.json or the tokenizer's files hold a value of the wrong kind ({error}); fetch them again"

    def notes(self) -> Iterator[str]:
        family = family_of(self.model_config)
        lost = lost_in_transformers(
            family.architecture,
            has_experts=family.has_experts,
            head_columns=head_size(self.model_config),
            rotated=rotated_columns(self.model_config),
            scales_rotary=rope_parameters(self.model_config)["rope_type"] != "default",
            vocabulary=self.source.tensors["model.embed_tokens.weight"].shape[0],
        )
        if lost is not None:
            yield f"transformers does not read this .gguf file as it is (seen in 5.24.0), which {lost}; llama.cpp does"
        window, context = window_of(self.model_config), context_length(self.model_config)
        if window == context and context < self.model_config.get("max_position_embeddings", 0):
            yield (
                f"readers of {family.architecture} .gguf files know no sliding windows: the file gives {context} tokens of "
                f"context, up to which they compute the same"
            )
        if family.architecture == "llama" and any(name.endswith(".bias") for name in self.entries):
            yield "transformers leaves out the biases of a .gguf file without an error (seen in 5.24.0); llama.cpp reads them"
        if count := len(self.plan.fallbacks):
            tensors = "1 tensor gets" if count == 1 else f"{count} tensors get"
            yield f"{tensors} a larger type than intended, as rows do not fill its blocks; --strict refuses that"

    def working_bytes(self, out_features: int, in_features: int) -> int:
        """Its magnitudes, then the blocks and a few rows at a time."""
        weights = out_features * in_features
        return max(4 * weights, weights + WORKING_BYTES_PER_CHUNK_WEIGHT * min(weights, CHUNK_WEIGHTS))

    def outer_peak_bytes(self, names: Iterable[str]) -> int:
        """One tensor at a time."""
        entries = [(self.source.tensors[name], self.entries[name]) for name in names if name in self.entries]
        return max(
            info.size_bytes + max(info.size_bytes, entry.size_bytes) + self.working_bytes(info.shape[0], info.shape[-1])
            for info, entry in entries
        )

    def written_bytes(self, layers: int, outer: int) -> int:
        file = gguf.make_file(self.plan, self.model_config, self.tokenizer())
        return super().written_bytes(0, file.size_bytes)

    def module_bytes(self, name: str) -> int:
        return self.other_bytes(part for part in (f"{name}.weight", f"{name}.bias") if part in self.entries)

    def other_bytes(self, names: Iterable[str]) -> int:
        return sum(self.entries[name].size_bytes for name in names)

    def tensor_table(self) -> str:
        return self.plan.table()


def _json_object(path: Path) -> dict[str, Any]:
    """What a file of the tokenizer holds; ValueError when that is no JSON object."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError too
        raise ValueError(f"`{path}` is not JSON: {error}; fetch it again") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"`{path}` is not a JSON object; fetch it again")
    return parsed
