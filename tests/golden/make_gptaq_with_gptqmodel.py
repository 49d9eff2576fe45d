"""Make the golden file of GPTAQ and FOEM; run by hand in an environment that has gptqmodel 7.7.0.

`python make_gptaq_with_gptqmodel.py DIRECTORY`
"""

import sys
from pathlib import Path

import torch
from gptqmodel.looper.named_module import NamedModule
from gptqmodel.looper.native_processor import NATIVE_INPUTS_STATE_KEY
from gptqmodel.quantization import FOEM, GPTAQ, FOEMConfig, GPTAQConfig, QuantizeConfig
from safetensors.torch import save_file

BASE = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "act_group_aware": False, "damp_percent": 0.05}
OPTIONS = {
    "gptaq": {"gptaq": GPTAQConfig()},
    "gptaq_whole": {"gptaq": GPTAQConfig(alpha=1.0)},
    "gptaq_desc_act": {"gptaq": GPTAQConfig(), "desc_act": True},
    "gptaq_static": {"gptaq": GPTAQConfig(), "static_groups": True},
    "gptaq_channel": {"gptaq": GPTAQConfig(), "group_size": -1},
    "foem": {"foem": FOEMConfig()},
    "foem_desc_act": {"foem": FOEMConfig(beta=0.1), "desc_act": True},
    "foem_gptaq": {"foem": FOEMConfig(alpha=0.25, beta=0.2)},
}


def quantized() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mix_KK = torch.randn(192, 192) / 192**0.5 + torch.eye(192)
    x_TK = torch.randn(176, 192) @ mix_KK * torch.exp(torch.randn(192) / 2)
    original_TK = x_TK + 0.2 * (x_TK @ torch.randn(192, 192) / 192**0.5 + torch.randn(176, 192))
    x_TK, original_TK = ((t * 8).round().clamp(-127, 127).to(torch.int8) for t in (x_TK, original_TK))
    weight_NK = (torch.randn(12, 192) * 40).round().clamp(-127, 127).to(torch.int8)
    tensors = {"inputs": x_TK, "originals": original_TK, "weight": weight_NK}
    for name, options in OPTIONS.items():
        config = QuantizeConfig(**(BASE | options))
        linear = torch.nn.Linear(192, 12, bias=False)
        linear.weight.data = weight_NK.float() / 1024
        module = NamedModule(linear, "linear", "model.layers.0.linear", 0)
        module.state[NATIVE_INPUTS_STATE_KEY] = [original_TK[None].float() / 8]
        quantizer = (GPTAQ if config.gptaq is not None else FOEM)(module, config)
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


if __name__ == "__main__":
    save_file(quantized(), Path(sys.argv[1]) / "gptqmodel_gptaq.safetensors")
