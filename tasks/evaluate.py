"""Judging a model: its perplexity, its distance from another one, a sentence it writes.

Works on a source and on our own exports alike. An export is read without any quantization package: each packed linear
gets its dense weight from our own unpacking, in float32, so that what is judged is what the file says, and not what a
kernel makes of it. Other programs are held to the same weights (tests/test_clients.py).

The dense model is held in memory whole; this is for judging models that fit, the quantization itself never does so.

Shape suffixes: T tokens, V vocabulary, W tokens of a window.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tasks.formats.gguf_families import lost_in_transformers
from tasks.formats.gguf_plan import ROPE_FACTORS
from tasks.models import fp8_weights, stacked_experts
from tasks.models.families import model_class
from tasks.models.layer_names import is_for_further_tokens
from tasks.models.source import INDEX_FILE, SINGLE_FILE, SourceModel
from tasks.output_directory import GGUF_FILE
from tasks.ruled_modules import of_module
from tasks.schemes import LAYOUTS


def dense_model(model_dir: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> Any:
    """The model in a local directory, on the CPU, in evaluation mode; packed linears as dense ones.

    A source is loaded as it is, an export with the weights that its codes, scales and zero points stand for; a .gguf file
    is read by transformers and the `gguf` package. ValueError for a directory that holds no model, another quantization
    method, and tensors that are missing or left over.
    """
    path = Path(model_dir)
    model, loading = _from_gguf(path, dtype) if (path / GGUF_FILE).is_file() else _from_tensors(path, dtype)
    problems = [f"{kind.replace('_', ' ')}: {sorted(map(str, names))}" for kind, names in loading.items() if names]
    if problems:
        raise ValueError(
            f"the tensors in `{path}` are not those of a {model.config.model_type} model of this configuration, "
            f"{'; '.join(problems)}; the export is incomplete or of another model"
        )
    return model.eval()


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    if lost := _lost_in_transformers(GGUFReader(path / GGUF_FILE)):
        raise ValueError(f"`{path / GGUF_FILE}` {lost}, which transformers does not read; judge it with llama.cpp")
    return AutoModelForCausalLM.from_pretrained(path, gguf_file=GGUF_FILE, dtype=dtype, output_loading_info=True)


def _lost_in_transformers(file: GGUFReader) -> str | None:
    """What of a .gguf file transformers leaves out without a word, or None."""
    held = {name: field.contents() for name, field in file.fields.items() if not name.startswith("tokenizer.")}
    architecture, names = held["general.architecture"], {tensor.name for tensor in file.tensors}
    biases = sorted(name for name in names if name.endswith(".bias"))
    if biases and architecture == "llama":
        return f"holds biases ({biases[0]} and others)"
    columns = held.get(f"{architecture}.attention.key_length", 0)
    return lost_in_transformers(
        architecture,
        has_experts=f"{architecture}.expert_count" in held,
        head_columns=columns,
        rotated=held.get(f"{architecture}.rope.dimension_count", columns),
        scales_rotary=ROPE_FACTORS in names or f"{architecture}.rope.scaling.type" in held,
        vocabulary=len(file.fields["tokenizer.ggml.tokens"].data),
    )


def _from_tensors(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    config = AutoConfig.from_pretrained(_readable_config(path).parent, local_files_only=True)
    quantization = getattr(config, "quantization_config", None)
    tensors = _tensors(path)
    stacking = stacked_experts.layout_of({"model_type": config.model_type})
    if quantization is not None:
        del config.quantization_config
        fp8 = fp8_weights.layout_of(quantization)
        if stacking is not None and stacked_experts.is_mxfp4(quantization):
            source = SourceModel.open(os.fspath(path))
            tensors = source.load_stacked(source.tensors)
        else:
            tensors = _widened(path, tensors, fp8) if fp8 is not None else _dense(path, tensors, quantization)
    if stacking is not None:
        tensors = stacked_experts.stacked(tensors, stacking)
    text_config = config.get_text_config()
    tensors = {name: tensor for name, tensor in tensors.items() if not is_for_further_tokens(name, text_config)}
    model, loading = model_class(config).from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told by the caller, with the other problems
    )
    return model, loading


def perplexity(model: Any, input_ids: Tensor, window: int = 512) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each window.

    `input_ids` [T] are cut into whole windows, each judged alone; a shorter rest is left out. ValueError when there is
    no whole window.
    """
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids_W in _windows(input_ids, window):
            log_probabilities_WV = _log_probabilities(model, ids_W)[:-1]
            total -= log_probabilities_WV.gather(1, ids_W[1:, None]).double().sum().item()
            count += window - 1
    return float(torch.tensor(total / count, dtype=torch.float64).exp())


def mean_kl(reference: Any, model: Any, input_ids: Tensor, window: int = 512) -> float:
    """Mean over all positions of KL(reference || model), in nats; windows as for `perplexity`."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids_W in _windows(input_ids, window):
            expected_WV = _log_probabilities(reference, ids_W)
            actual_WV = _log_probabilities(model, ids_W)
            total += (expected_WV.exp() * (expected_WV - actual_WV)).sum(dim=1).double().sum().item()
            count += window
    return total / count


def generate(model: Any, tokenizer: Any, prompt: str, tokens: int = 32) -> str:
    """How `model` goes on after `prompt`, greedily, for at most `tokens` tokens; without the prompt.

    The model's own generation settings (sampling, lengths) are not used, but for the token that ends a text.
    """
    ids_1T = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64)
    if not ids_1T.numel():
        raise ValueError("the prompt has no tokens; give it at least one word")
    end = model.generation_config.eos_token_id
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=end,
        pad_token_id=end[0] if isinstance(end, list) else end,
    )
    with torch.inference_mode():
        written_1T = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings)
    return str(tokenizer.decode(written_1T[0, ids_1T.shape[1] :], skip_special_tokens=True))


def _windows(input_ids: Tensor, window: int) -> Iterator[Tensor]:
    if input_ids.dim() != 1:
        raise ValueError(f"input_ids have the shape {tuple(input_ids.shape)}; give one row of token ids")
    if window < 2:
        raise ValueError(f"a window of {window} tokens holds nothing to predict; use at least 2")
    whole = len(input_ids) // window
    if not whole:
        raise ValueError(
            f"{len(input_ids)} tokens do not fill one window of {window}; use a longer text or a shorter window"
        )
    yield from input_ids[: whole * window].split(window)


def _log_probabilities(model: Any, ids_W: Tensor) -> Tensor:
    """float32 [W, V]; one window at a time: logits are the largest tensor here."""
    logits_WV = model(ids_W[None], use_cache=False).logits[0].float()
    if not bool(logits_WV.isfinite().all()):
        raise ValueError("the model gives NaN or Inf: its weights are damaged, or its dtype too narrow")
    return torch.log_softmax(logits_WV, dim=-1)


def _readable_config(path: Path) -> Path:
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(f"`{path}` holds no config.json; name the directory of a model or of a finished export")
    return config


def _tensors(path: Path) -> dict[str, Tensor]:
    index = path / INDEX_FILE
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (path / SINGLE_FILE).is_file():
        shards = [SINGLE_FILE]
    else:
        raise ValueError(
            f"`{path}` holds neither {INDEX_FILE} nor {SINGLE_FILE}; an export that was cut short has none"
        )
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            tensors.update(load_file(path / shard))
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(
                f"`{path / shard}`, which the index names, can't be read ({error}); make the export again"
            ) from error
    return tensors


def _widened(path: Path, tensors: dict[str, Tensor], layout: fp8_weights.FP8Layout) -> dict[str, Tensor]:
    """FP8 weights in float32, not rounded to the model's dtype; of a source as of an export."""
    plain = {name: tensor for name, tensor in tensors.items() if not layout.is_scale(name)}
    for name, tensor in plain.items():
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            scales = tensors.get(scale := layout.scale_of(name))
            block = None if scales is None else layout.block_of(tuple(tensor.shape), tuple(scales.shape))
            if scales is None or block is None:
                what = "lacks" if scales is None else "has in another shape than its config says"
                raise ValueError(f"`{path}` {what} `{scale}`, without which `{name}` can't be read")
            plain[name] = fp8_weights.dequantize(tensor, scales, block, torch.float32)
    return plain


def _dense(path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> dict[str, Tensor]:
    method = quantization.get("quant_method")
    layout: Any = LAYOUTS.get(str(method))
    if layout is None:
        raise ValueError(
            f"`{path}` is quantized with `{method}`; the layouts that can be read are {', '.join(LAYOUTS)}"
        )
    mark = layout.parts(layout.config_of(quantization))[0]
    packed = sorted(name.removesuffix(f".{mark}") for name in tensors if name.endswith(f".{mark}"))
    if not packed:
        raise ValueError(f"`{path}` says that it is quantized and holds no .{mark} tensor; make the export again")
    configs = {name: layout.config_of(of_module(quantization, name)) for name in packed}
    parts = {f"{name}.{part}" for name in packed for part in layout.parts(configs[name])}
    if parts - tensors.keys():
        raise ValueError(f"`{path}` lacks {sorted(parts - tensors.keys())}, without which their modules can't be read")
    dense = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name in packed:
        dense[f"{name}.weight"] = layout.unpack(tensors, name, configs[name]).dequantize()
    return dense
