"""Make the golden file of ParoQuant; run by hand in an environment that has gptqmodel 7.7.0.

`python make_paroquant_with_gptqmodel.py EXPORT.safetensors DIRECTORY`, where EXPORT is GPTQModel's own export of a model.
"""

import sys
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.paroquant import ParoLinear
from safetensors.torch import load_file, save_file

MODULE = "model.layers.0.self_attn.k_proj"


def main(export: Path, directory: Path) -> None:
    tensors = {
        name.removeprefix(f"{MODULE}."): tensor
        for name, tensor in load_file(export).items()
        if name.startswith(f"{MODULE}.")
    }
    in_features, out_features = tensors["qweight"].shape[0], tensors["scales"].shape[1]
    layer = ParoLinear(
        bits=4, group_size=128, sym=True, desc_act=False, bias=False, in_features=in_features, out_features=out_features,
        register_buffers=True, krot=8,
    )  # fmt: skip
    for name, tensor in tensors.items():
        setattr(layer, name, tensor.float() if name in ("scales", "theta", "channel_scales") else tensor)
    layer.post_init()
    layer.eval()
    torch.manual_seed(0)
    tensors["inputs"] = torch.randn(6, in_features)
    tensors["outputs"] = layer(tensors["inputs"])
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "gptqmodel_paroquant.safetensors"
    )


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
