"""What methods with large tiles cost in quality, beside the others: on SmolLM2-135M's first layers, widened with zeros.

    python -m benchmarks.quality_of_tiles MODEL DIR [--layers 4]

QQQ and EXL3 fill tiles of 128, and SmolLM2-135M is 576 wide. Here it is 768 wide, with 12 heads that share 4 keys and
values for 9 that share 3: what is added is zero, so that the model computes the same as before, but for norms whose weights
are scaled and rounded. It is cut to its first layers, since EXL3 searches some ten thousand weights a second on a CPU core;
the perplexity of such a torso says little, its KL against the unquantized one does. Texts as in quality.py. DIR keeps the
model, exports and checkpoints: run it again to go on.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from benchmarks.quality import Setting, measure, show
from tasks.quantization import AWQConfig, EoRAConfig, EXL3Config, GPTQConfig, ParoQuantConfig, QQQConfig, RTNConfig

WIDTH, HEADS, KEY_HEADS = 768, 12, 4

SETTINGS = (
    Setting("rtn 4 bit g128", RTNConfig()),
    Setting("gptq 4 bit g128", GPTQConfig()),
    Setting("awq 4 bit g128", AWQConfig()),
    Setting("qqq 4 bit g128", QQQConfig()),
    Setting("qqq 4 bit g128, mse 2.4", QQQConfig(mse=2.4)),
    Setting("qqq 4 bit per channel, mse 2.4", QQQConfig(group_size=-1, mse=2.4)),
    Setting("gptq 4 bit g128 with adapter", GPTQConfig(), adapter=EoRAConfig()),
    Setting("awq 4 bit g128 with adapter", AWQConfig(), adapter=EoRAConfig()),
    Setting("qqq 4 bit g128 with adapter", QQQConfig(), adapter=EoRAConfig()),
    Setting("exl3 2 bit", EXL3Config(bits=2, compiled=True)),
    Setting("exl3 3 bit", EXL3Config(bits=3, compiled=True)),
    Setting("exl3 4 bit", EXL3Config(bits=4, compiled=True)),
    Setting("paroquant 4 bit g128", ParoQuantConfig()),
    Setting("paroquant 4 bit g128 with adapter", ParoQuantConfig(), adapter=EoRAConfig()),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("directory", type=Path, help="where the model, exports and checkpoints are kept")
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    model = directory / f"widened-{arguments.layers}"
    if not model.is_dir():
        widen(arguments.model, model, arguments.layers)
    show(measure(model, directory / f"of-{arguments.layers}-layers", SETTINGS))
    return 0


def widen(model: Path, target: Path, layers: int) -> None:
    """Write the first `layers` of SmolLM2-135M at `model` to the new directory `target`, with zeros for what is added."""
    config = AutoConfig.from_pretrained(model)
    width, head = config.hidden_size, config.head_dim
    # A norm divides by the root mean square, which zeros lower.
    share = width / WIDTH
    sizes = {width: WIDTH, config.num_key_value_heads * head: KEY_HEADS * head}
    kept = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers:
            continue
        if "norm" in name:
            kept[name] = _padded((tensor.float() * math.sqrt(share)).to(tensor.dtype), (WIDTH,))
        elif "embed" in name:
            kept[name] = _padded(tensor, (len(tensor), WIDTH))
        else:
            rows, columns = (sizes.get(size, size) for size in tensor.shape)
            if "q_proj" in name:
                rows = HEADS * head
            elif "o_proj" in name:
                columns = HEADS * head
            kept[name] = _padded(tensor, (rows, columns))
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = WIDTH, HEADS, KEY_HEADS
    config.num_hidden_layers, config.rms_norm_eps = layers, config.rms_norm_eps * share
    making = target.with_name(f"{target.name}.partial")
    making.mkdir(parents=True, exist_ok=True)
    save_file(kept, making / "model.safetensors", {"format": "pt"})
    config.save_pretrained(making)
    AutoTokenizer.from_pretrained(model).save_pretrained(making)
    making.rename(target)


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` in the first corner of zeros of this shape."""
    wide = torch.zeros(shape, dtype=tensor.dtype)
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


if __name__ == "__main__":
    sys.exit(main())
