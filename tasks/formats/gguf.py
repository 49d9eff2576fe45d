"""One .gguf file: what llama.cpp and the programs around it load.

Metadata, tokenizer and a table of tensors come first, then the tensors, each at a multiple of 32 bytes. Of llama and its kin
weights of attention's query and key are stored with the rows of each head rearranged: transformers rotates the first half of a
head's columns against the second, llama.cpp neighbours against neighbours. A row holds whole blocks, so rows can be
rearranged before or after they are encoded.

A layer is encoded by itself, into tensors under the file's own names: uint8 [N, bytes of a row] for blocks, float32 and
float16 for the rest. The file is put together last, from those, a tensor at a time; nothing here opens it. The header
is written by the `gguf` package.

Shape suffixes: N out_features, K in_features, P bytes of a row.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tasks.formats import gguf_families
from tasks.formats.gguf_families import add_metadata, family_of, head_size, rope_parameters
from tasks.formats.gguf_plan import FLOAT_BYTES, GGUFPlan, TensorPlan
from tasks.formats.gguf_tokenizer import TokenizerFields
from tasks.methods import ggml
from tasks.methods.ggml_blocks import BLOCK_TYPES
from tasks.methods.grid import LARGEST_HALF, WeightError

ALIGNMENT = 32
QUANTIZATION_VERSION = 2
FLOAT_IDS = {"f32": 0, "f16": 1}


@dataclass(frozen=True)
class GGUFFile:
    """A file that is about to be written: its first bytes, and the tensors that follow in order."""

    header: bytes
    plan: GGUFPlan

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(_padded(whole.size_bytes) for whole, _ in self.plan.stored)

    def pieces(self, load: Callable[[TensorPlan], Tensor]) -> Iterator[memoryview]:
        """The file from its first byte to its last; `load` gives one encoded tensor at a time, as `encode` made it.

        ValueError, naming the tensor, for one of another dtype or shape than planned.
        """
        yield memoryview(self.header)
        for whole, parts in self.plan.stored:
            for entry in parts:
                tensor = load(entry)
                _check_encoded(entry, tensor)
                yield tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
            yield memoryview(bytes(_padded(whole.size_bytes) - whole.size_bytes))


def problems(model_config: Mapping[str, Any]) -> list[str]:
    """Why this model can't be written, from its `config.json`, one sentence each; shapes are the plan's to judge."""
    found = []
    if find_spec("gguf") is None:
        found.append("the gguf package is not installed; run `pip install 'prefect-quantize[gguf]'`")
    found += gguf_families.problems(model_config)
    return found


def encode(entry: TensorPlan, tensor: Tensor, importance_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Any rows of one tensor as the file holds them, and each row's mean squared error; on the tensor's device.

    The rows are not rearranged: give all of a tensor's encoded rows to `arrange`. WeightError for NaN, infinite and
    huge weights.
    """
    if entry.actual in BLOCK_TYPES:
        rows = ggml.quantize_rows(tensor, entry.actual, importance_K)
        return rows.blocks_NP, rows.losses_N
    if entry.offset:
        tensor = tensor.float() + entry.offset
    limit = LARGEST_HALF if entry.actual == "f16" else math.inf
    if not bool((tensor.isfinite() & (tensor.abs() <= limit)).all()):
        raise WeightError(
            f"`{entry.source}` holds NaN, infinite or (for {entry.actual}) too large values; the source file is damaged "
            f"or the model diverged"
        )
    encoded = tensor.to(torch.float16 if entry.actual == "f16" else torch.float32)
    return encoded, (encoded.float() - tensor.float()).square().reshape(len(tensor), -1).mean(dim=1)


def decode(entry: TensorPlan, encoded: Tensor) -> Tensor:
    """float32, in the source model's row order: exactly what readers of the file compute from `arrange`d tensors."""
    dense = ggml.decode(encoded, entry.actual) if entry.actual in BLOCK_TYPES else encoded.float()
    if not entry.heads:
        return dense - entry.offset
    half = len(dense) // entry.heads // 2
    return dense.unflatten(0, (entry.heads, half, 2)).transpose(1, 2).reshape(dense.shape)


def arrange(entry: TensorPlan, encoded: Tensor) -> Tensor:
    """A whole encoded tensor (or bias) with the rows of each head in the file's order; others as they are."""
    if not entry.heads:
        return encoded.contiguous()
    half = len(encoded) // entry.heads // 2
    return encoded.unflatten(0, (entry.heads, 2, half)).transpose(1, 2).reshape(encoded.shape)


def encode_all(
    entries: tuple[TensorPlan, ...], tensors: Mapping[str, Tensor], importance: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Whole tensors (of a layer, or those outside the layers) under the file's names, and the loss of each.

    `tensors` and `importance` go by the source's names; a tensor without importance is encoded without. Computed
    tensors are not among them: see `rope_factors`.
    """
    encoded, losses = {}, {}
    for entry in entries:
        if entry.source is None:
            continue
        rows, losses_N = encode(entry, tensors[entry.source], (importance or {}).get(entry.source))
        encoded[entry.name] = arrange(entry, rows)
        losses[entry.name] = float(losses_N.mean())
    return encoded, losses


def rope_factors(model_config: Mapping[str, Any]) -> Tensor:
    """float32 [head_dim / 2]: what llama 3's rotary scaling divides each frequency by; the file holds the factors."""
    rope = rope_parameters(model_config)
    size = head_size(model_config)
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def make_file(
    plan: GGUFPlan, model_config: Mapping[str, Any], tokenizer: TokenizerFields, name: str | None = None
) -> GGUFFile:
    """Metadata, tokenizer and tensor table as the first bytes of the file; `name` is the model's title.

    ValueError when `problems` has something to say.
    """
    found = problems(model_config)
    if found:
        raise ValueError("; ".join(found))
    import gguf  # here, since it takes a second and only an export needs it

    writer = gguf.GGUFWriter(None, family_of(model_config).architecture)
    writer.add_type("model")
    if name:
        writer.add_name(name)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    writer.add_file_type(plan.file_type)
    add_metadata(writer, model_config, len(tokenizer.tokens))
    _add_tokenizer(writer, tokenizer)
    for entry, _ in plan.stored:
        number = FLOAT_IDS[entry.actual] if entry.actual in FLOAT_BYTES else BLOCK_TYPES[entry.actual].ggml_id
        raw_type = gguf.GGMLQuantizationType(number)
        # With any dtype but uint8 the shape given is that of the weights, not of the bytes.
        writer.add_tensor_info(entry.name, entry.shape, "float32", entry.size_bytes, raw_dtype=raw_type)
    buffer = io.BytesIO()
    # The writer takes an open file where it has one; so it writes to memory and the caller to the disk.
    writer.fout, writer.state = [buffer], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = buffer.getvalue()
    return GGUFFile(header + bytes(_padded(len(header)) - len(header)), plan)


def _add_tokenizer(writer: Any, fields: TokenizerFields) -> None:
    writer.add_tokenizer_model(fields.kind)
    writer.add_tokenizer_pre(fields.pre or "default")
    writer.add_token_list(fields.tokens)
    writer.add_token_types(fields.types)
    if fields.scores:
        writer.add_token_scores(fields.scores)
    if fields.merges:
        writer.add_token_merges(fields.merges)
    for role, index in fields.special_ids.items():
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(fields.adds_bos)
    writer.add_add_eos_token(fields.adds_eos)
    writer.add_add_space_prefix(fields.adds_space_prefix)
    if fields.chat_template:
        writer.add_chat_template(fields.chat_template)


def _check_encoded(entry: TensorPlan, tensor: Tensor) -> None:
    dtype = {"f16": torch.float16, "f32": torch.float32}.get(entry.actual, torch.uint8)
    held = tensor.numel() * tensor.element_size()
    if tensor.dtype != dtype or len(tensor) != entry.shape[0] or held != entry.size_bytes:
        raise ValueError(
            f"`{entry.name}` is planned as {entry.actual} {list(entry.shape)} ({entry.size_bytes} bytes) and given as "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} ({held} bytes); it was encoded for "
            f"another plan"
        )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
