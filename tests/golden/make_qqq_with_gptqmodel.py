"""Make the golden file of QQQ; run by hand in an environment that has gptqmodel 7.7.0.

`python make_qqq_with_gptqmodel.py DIRECTORY`
"""

import sys
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.qqq import QQQTorchLinear
from gptqmodel.quantization import METHOD, QuantizeConfig
from gptqmodel.quantization.qqq import QQQ
from safetensors.torch import save_file

SIZES = {"out_features": 64, "in_features": 256}


def main(directory: Path) -> None:
    torch.manual_seed(0)
    mixing_KK = torch.randn(256, 256) / 16 + torch.eye(256)
    x_TK = torch.randn(224, 256) @ mixing_KK * torch.exp(torch.randn(256) / 2)
    x_TK = (x_TK * 8).round().clamp(-127, 127).to(torch.int8)
    weight_NK = (torch.randn(64, 256) * 30 * torch.exp(torch.randn(64, 1) / 4)).round().clamp(-127, 127).to(torch.int8)
    tensors = {"inputs": x_TK, "weight": weight_NK}
    for group_size in (128, -1):
        config = QuantizeConfig(
            bits=4, group_size=group_size, sym=True, desc_act=False, damp_percent=0.005, quant_method=METHOD.QQQ, format="qqq"
        )  # fmt: skip
        linear = torch.nn.Linear(256, 64, bias=False)
        linear.weight.data = weight_NK.float() / 1024
        quantizer = QQQ(linear, config)
        quantizer.quantizer.configure(4, perchannel=True, sym=True, mse=False, groupsize=group_size)
        quantizer.add_batch(x_TK[None].float() / 8, None)
        dense_NK, scales_NG, *_, channel_N1, _ = quantizer.quantize()
        layer = QQQTorchLinear(
            bits=4, group_size=group_size, desc_act=False, sym=True, bias=False, register_buffers=True, **SIZES
        )
        linear.weight.data = dense_NK
        layer.pack(linear, scales_NG, channel_N1)
        layer.post_init()
        name = f"g{group_size}"
        tensors |= {f"{name}.{part}": getattr(layer, part).clone() for part in ("B", "s_channel", "s_group")}
        tensors[f"{name}.outputs"] = layer(x_TK[:8].float() / 8)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "gptqmodel_qqq.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
