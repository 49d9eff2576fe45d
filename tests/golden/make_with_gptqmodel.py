"""Make the golden files that come from GPTQModel; run by hand in an environment that has gptqmodel 7.7.0.

`python make_with_gptqmodel.py DIRECTORY`
"""

import sys
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.gptq import GPTQ
from gptqmodel.utils.backend import BACKEND
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

BASE = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "act_group_aware": False, "damp_percent": 0.05}
OPTIONS = {
    "plain": {},
    "g64": {"group_size": 64},
    "channel": {"group_size": -1},
    "asym": {"sym": False},
    "b2": {"bits": 2},
    "b3": {"bits": 3},
    "b8": {"bits": 8},
    "desc_act": {"desc_act": True},
    "group_aware": {"act_group_aware": True},
    "static": {"static_groups": True},
    "static_desc_act": {"static_groups": True, "desc_act": True},
    "mse": {"mse": 2.4},
    "b2_asym_mse": {"bits": 2, "sym": False, "mse": 2.4},
}


def quantized() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x_TK = torch.randn(224, 192) @ (torch.randn(192, 192) / 192**0.5 + torch.eye(192)) * torch.exp(torch.randn(192) / 2)
    x_TK = (x_TK * 8).round().clamp(-127, 127).to(torch.int8)
    weight_NK = (torch.randn(12, 192) * 40).round().clamp(-127, 127).to(torch.int8)
    tensors = {"inputs": x_TK, "weight": weight_NK}
    for name, options in OPTIONS.items():
        config = QuantizeConfig(**(BASE | options))
        linear = torch.nn.Linear(192, 12, bias=False)
        linear.weight.data = weight_NK.float() / 1024
        quantizer = GPTQ(linear, config)
        quantizer.quantizer.configure(perchannel=True)
        quantizer.add_batch(x_TK[None].float() / 8, None)
        dense_NK, scales_NG, zeros_NG, g_idx_K, *_ = quantizer.quantize()
        columns_K = g_idx_K.long()
        codes_NK = torch.round(dense_NK / scales_NG[:, columns_K] + zeros_NG[:, columns_K])
        tensors[f"{name}.codes"] = codes_NK.to(torch.uint8)
        tensors[f"{name}.scales"] = scales_NG.half().contiguous()
        tensors[f"{name}.zeros"] = zeros_NG.to(torch.uint8).contiguous()
        tensors[f"{name}.g_idx"] = g_idx_K.to(torch.uint8)
    return tensors


def packed() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {}
    for bits in (2, 3, 4, 8):
        codes_NK = torch.randint(0, 2**bits, (32, 64))
        zeros_NG = torch.randint(1, 2**bits, (32, 2))
        scales_NG = (torch.rand(32, 2) + 0.5).half().float()
        g_idx_K = torch.arange(64, dtype=torch.int32) // 32
        linear = torch.nn.Linear(64, 32, bias=False)
        columns_K = g_idx_K.long()
        linear.weight.data = (codes_NK - zeros_NG[:, columns_K]) * scales_NG[:, columns_K]
        layer = TorchLinear(
            bits=bits, group_size=32, sym=False, desc_act=False, in_features=64, out_features=32, bias=False,
            pack_dtype=torch.int32, adapter=None, backend=BACKEND.TORCH, register_buffers=True,
        )  # fmt: skip
        layer.pack_original(linear, scales_NG, zeros_NG, g_idx_K)
        tensors |= {f"b{bits}.codes": codes_NK.to(torch.uint8), f"b{bits}.zeros": zeros_NG.to(torch.uint8)}
        tensors |= {f"b{bits}.{name}": getattr(layer, name).clone() for name in ("qweight", "scales", "g_idx")}
        tensors[f"b{bits}.gptq_v2.qzeros"] = layer.qzeros.clone()
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=32))
        tensors[f"b{bits}.gptq.qzeros"] = layer.qzeros.clone()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def packed_awq() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    codes_NK = torch.randint(0, 16, (24, 64))
    zeros_NG = torch.randint(0, 16, (24, 2))
    scales_NG = (torch.rand(24, 2) + 0.5).half().float()
    columns_K = torch.arange(64) // 32
    linear = torch.nn.Linear(64, 24, bias=True)
    linear.weight.data = (codes_NK - zeros_NG[:, columns_K]) * scales_NG[:, columns_K]
    linear.bias.data = linear.bias.data.half().float()
    layer = AwqTorchLinear(
        bits=4, group_size=32, sym=False, desc_act=False, in_features=64, out_features=24, bias=True,
        register_buffers=True,
    )  # fmt: skip
    layer.pack(linear, scales_NG.half(), zeros_NG)
    tensors = {"codes": codes_NK.to(torch.uint8), "zeros": zeros_NG.to(torch.uint8), "source_bias": linear.bias.data}
    tensors |= {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    layer.post_init()
    x_TK = torch.randn(3, 64).half()
    with torch.inference_mode():
        tensors |= {"x": x_TK, "y": layer(x_TK)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    save_file(quantized(), directory / "gptqmodel_gptq.safetensors")
    save_file(packed(), directory / "gptqmodel_packed.safetensors")
    save_file(packed_awq(), directory / "gptqmodel_awq.safetensors")
