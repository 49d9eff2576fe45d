"""Loads exports as their users do and writes what came out. Runs in the client environment, imports nothing of ours.

    python gptqmodel_logits.py REQUEST.json

REQUEST holds {"loader": "transformers" | "gptqmodel", "answer": FILE, "models": {DIRECTORY: {"input_ids": [[..]],
"logits": FILE}}}. The answer is JSON (stdout is full of the libraries' own words), by directory: the classes of the
modules that replaced the linears of the decoder layers (those of vision towers are under `vision`), missing and unexpected keys (transformers only, GPTQModel does
not tell), or an error. The file of logits gets two tensors: `loaded`, those of the model as it came (float32 through
transformers; float16 is what GPTQModel's own loader takes); and `widened`, those after everything was turned into
float32: the torch kernel multiplies codes and scales in the scales' dtype, float16, which costs up to half a unit in
the eleventh bit of every weight.
"""

import json
import re
import sys
import traceback
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AwqConfig, GPTQConfig

# The kernels that every CPU has; `auto` picks one by the CPU's instructions and may compile it first.
BACKENDS = {
    "gptq": BACKEND.GPTQ_TORCH,
    "awq": BACKEND.AWQ_TORCH,
    "qqq": BACKEND.QQQ_TORCH,
    "paroquant": BACKEND.PAROQUANT_CUDA,
}
SIGHT = re.compile(r"(^|\.)(vision_tower|multi_modal_projector|visual)\.")


def load(loader: str, directory: str):
    """The model and what its loader says of missing and unexpected keys."""
    config = json.loads((Path(directory) / "config.json").read_text())
    described = config["quantization_config"]
    method = described["quant_method"]
    if loader == "gptqmodel":
        return GPTQModel.load(directory, backend=BACKENDS[method], device="cpu", dtype=torch.float16).model, {}
    # Only the backend is taken from here.
    is_awq = method == "awq"
    chosen = AwqConfig(backend="torch_awq") if is_awq else GPTQConfig(bits=described["bits"], backend="gptq_torch")
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, quantization_config=chosen, output_loading_info=True)


def judge(loader: str, directory: str, request: dict) -> dict:
    model, loading = load(loader, directory)
    model.eval()
    input_ids = torch.tensor(request["input_ids"])
    with torch.inference_mode():
        logits = {"loaded": model(input_ids=input_ids).logits.float()}
        if not any(type(module).__name__ == "ParoLinear" for module in model.modules()):  # which can't be widened
            torch.nn.Module.float(model)  # its own `float` refuses quantized models
            logits["widened"] = model(input_ids=input_ids).logits.float()
    save_file({name: tensor.contiguous() for name, tensor in logits.items()}, request["logits"])
    classes = {
        name: f"{type(module).__module__}.{type(module).__name__}"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or name.endswith("_proj")
    }
    return {
        "classes": {n: kind for n, kind in classes.items() if n.endswith("_proj") and not SIGHT.search(n)},
        "vision": {n: kind for n, kind in classes.items() if SIGHT.search(n)},
        "missing": sorted(loading.get("missing_keys", [])),
        "unexpected": sorted(loading.get("unexpected_keys", [])),
        "error": None,
    }


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    answer = {}
    for directory, model_request in request["models"].items():
        try:
            answer[directory] = judge(request["loader"], directory, model_request)
        except Exception:
            answer[directory] = {"error": traceback.format_exc()}
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
