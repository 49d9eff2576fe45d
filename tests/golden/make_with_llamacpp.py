"""Make the golden file that comes from llama.cpp; run by hand where xllamacpp 2026.10.11549, torch and safetensors are.

`python make_with_llamacpp.py DIRECTORY`
"""

import ctypes
import sys
from pathlib import Path

import torch
import xllamacpp.xllamacpp
from safetensors.torch import save_file
from torch import Tensor

# name: (ggml type, weights of a block, bytes of a block)
TYPES = {
    "q2_k": (10, 256, 84),
    "q3_k": (11, 256, 110),
    "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
}


def quantize(weight_NK: Tensor, block_type: str, importance_K: Tensor | None) -> Tensor:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    number, weights, size = TYPES[block_type]
    rows, columns = weight_NK.shape
    blocks = torch.zeros(rows, columns // weights * size, dtype=torch.uint8)
    importance = None if importance_K is None else importance_K.data_ptr()
    written = library.ggml_quantize_chunk(number, weight_NK.data_ptr(), blocks.data_ptr(), 0, rows, columns, importance)
    assert written == blocks.numel()
    return blocks


def main() -> None:
    torch.manual_seed(0)
    normal_NK = torch.randn(4, 512) * 0.05
    heavy_NK = torch.distributions.StudentT(4.0).sample((4, 512)) * 0.02
    shifted_NK = torch.randn(2, 512) * 0.01 + torch.tensor([[0.2], [-0.2]])
    weight_NK = torch.cat([normal_NK, heavy_NK, shifted_NK]).half().float()
    importance_K = torch.rand(512) ** 4 + 1e-3
    tensors = {"weight": weight_NK.half(), "importance": importance_K}
    for block_type in TYPES:
        tensors[f"{block_type}.plain"] = quantize(weight_NK, block_type, None)
        tensors[f"{block_type}.weighted"] = quantize(weight_NK, block_type, importance_K)
    save_file(tensors, Path(sys.argv[1]) / "llamacpp_blocks.safetensors")


if __name__ == "__main__":
    main()
