"""Random EXL3 tensors and the weights that GPTQModel's torch decoder reads in them. Imports nothing of ours.

    python make_exl3_with_gptqmodel.py DIRECTORY

One tile for each codebook and width: `<codebook>.<bits>.trellis` and `.inner`, float32 [16, 16], input channels down. One
module of 128 x 128 at 3 bits: `module.trellis`, `.suh`, `.svh`, `.mcg` and `.weight_KN`, float32, of the first 64 output
channels. GPTQModel sums two float16 of a codebook in float32; exllamav3's kernels round the sum to float16.
"""

import sys
from pathlib import Path

import torch
from gptqmodel.nn_modules.exllamav3_torch import ExllamaV3TorchLinear
from safetensors.torch import save_file

MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def layer(bits: int, codebook: str, tiles: int) -> ExllamaV3TorchLinear:
    size = 16 * tiles
    tensors = {
        "trellis": torch.randint(-(1 << 15), 1 << 15, (tiles, tiles, 16 * bits)).to(torch.int16),
        "suh": (torch.randn(size) * 0.02).half(),
        "svh": torch.randn(size).sign().half(),
    }
    if codebook in MULTIPLIERS:
        tensors[codebook] = torch.tensor(MULTIPLIERS[codebook] - (1 << 32), dtype=torch.int32)
    return ExllamaV3TorchLinear.from_tensors(in_features=size, out_features=size, name="module", tensors=tensors)


def main() -> None:
    torch.manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for codebook in ("3inst", "mcg", "mul1"):
        for bits in range(2, 9):
            one = layer(bits, codebook, tiles=1)
            made[f"{codebook}.{bits}.trellis"] = one.trellis
            made[f"{codebook}.{bits}.inner"] = one.get_inner_weight_tensor(torch.float32)
    module = layer(3, "mcg", tiles=8)
    made |= {f"module.{part}": getattr(module, part) for part in ("trellis", "suh", "svh", "mcg")}
    made["module.weight_KN"] = module.get_weight_tensor(torch.float32)[:, :64].contiguous()
    save_file(made, Path(sys.argv[1]) / "gptqmodel_exl3.safetensors")


if __name__ == "__main__":
    main()
