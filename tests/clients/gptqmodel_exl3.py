"""Loads an EXL3 export as GPTQModel's users do and writes the logits. Runs in the client environment, imports nothing of ours.

    python gptqmodel_exl3.py DIRECTORY ANSWER.safetensors

Fails unless every linear of the decoder layers was replaced by the class that decodes EXL3 on a CPU.
"""

import sys

import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file


def main() -> None:
    directory, answer = sys.argv[1:]
    model = GPTQModel.load(directory, backend=BACKEND.EXL3_TORCH, device="cpu", dtype=torch.float32).model.eval()
    classes = {type(module).__name__ for name, module in model.named_modules() if name.endswith("_proj")}
    if classes != {"ExllamaV3TorchLinear"}:
        raise SystemExit(f"linears were replaced by {sorted(classes)}")
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(40)[None] * 7 % 311).logits.float()
    save_file({"logits": logits.contiguous()}, answer)


if __name__ == "__main__":
    main()
