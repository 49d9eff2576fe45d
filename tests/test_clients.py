"""Other programs load our exports and compute what our own reading of the file says.

"It loaded" proves nothing: wrong layouts load too, and give garbage. So each export is held to four things: no missing
and no unexpected keys, every linear of a decoder layer replaced by the client's packed class, and the logits, against
the dense model of tasks/evaluate.py. The client runs in an environment of its own (client_environment.py).
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from checkpoint_store.config import CheckpointConfig
from flows.demo import CALIBRATION_TEXT, HELD_OUT_TEXT
from flows.demo_model import demo_model
from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.quantization import AWQConfig, GPTQConfig, RTNConfig
from tests.client_environment import client_python
from tests.flow_jobs import tiny_job
from tests.packed_models import write_packed
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.slow

CLIENT_SCRIPT = Path(__file__).parent / "clients" / "gptqmodel_logits.py"
CLIENT_SECONDS = 600
CLIENT_VARIABLES = {
    "GPTQMODEL_CPU_WORKERS": "2",  # on two cores its loader fails without
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # most models are tiny
    "TORCHDYNAMO_DISABLE": "1",  # the same kernel, without half a minute of compiling
}
CLIENT_CLASS = "gptqmodel.nn_modules.qlinear.torch.TorchLinear"
AWQ_CLIENT_CLASS = "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear"
# The client multiplies codes and scales in float16: half a unit in the eleventh bit of each weight.
LOADED_TOLERANCE = 1e-3
# And GPTQModel's own loader computes everything in float16: two layers lose 2e-3, the 30 of SmolLM2 1e-2.
HALF_TOLERANCE = 4e-3
# With float32 scales only the order of sums is left.
WIDENED_TOLERANCE = 1e-5
# The client's awq kernel computes in float16, whatever the model's dtype. Where our linears are rounded likewise, the
# precision of its sums is left, to which a bias in float16 adds; a wrong layout is off by about 1.
AWQ_TOLERANCE = 3e-3
ROUNDED_AWQ_TOLERANCE = 2e-3

EXPORTS: dict[str, tuple[GPTQConfig | RTNConfig, dict]] = {
    f"rtn-{bits}-{'sym' if sym else 'asym'}-{checkpoint_format}": (
        RTNConfig(bits=bits, group_size=64, sym=sym, checkpoint_format=checkpoint_format),
        {},
    )
    for bits in (2, 3, 4, 8)
    for sym in (True, False)
    for checkpoint_format in ("gptq", "gptq_v2")
} | {
    "gptq-2": (GPTQConfig(bits=2, group_size=64), {}),
    "gptq-3": (GPTQConfig(bits=3, group_size=64), {}),
    "gptq-4": (GPTQConfig(bits=4, group_size=64), {}),
    "gptq-8": (GPTQConfig(bits=8, group_size=64), {}),
    "gptq-2-asym-v2": (GPTQConfig(bits=2, group_size=64, sym=False, checkpoint_format="gptq_v2"), {}),
    "gptq-4-asym": (GPTQConfig(bits=4, group_size=64, sym=False), {}),
    "desc_act": (GPTQConfig(group_size=32, desc_act=True), {}),
    "desc_act-static_groups": (GPTQConfig(group_size=32, desc_act=True, static_groups=True), {}),
    "desc_act-3-asym": (GPTQConfig(bits=3, group_size=32, desc_act=True, sym=False), {}),
    "act_group_aware": (GPTQConfig(group_size=32, act_group_aware=True), {}),
    "per-channel": (GPTQConfig(group_size=-1), {}),
    "mse": (RTNConfig(group_size=64, mse=2.4), {}),
    "tied": (GPTQConfig(group_size=64), {"tied": True}),
    "biased": (GPTQConfig(group_size=64), {"attention_bias": True, "mlp_bias": True}),
    "rope-scaling": (RTNConfig(group_size=64), {"llama3_rope": True}),
    "float16": (RTNConfig(group_size=64), {"dtype": torch.float16}),
    "awq-rtn-sym": (RTNConfig(group_size=64, checkpoint_format="awq"), {}),
    "awq-rtn-asym": (RTNConfig(group_size=32, sym=False, checkpoint_format="awq"), {}),
    "awq-per-channel": (RTNConfig(group_size=-1, sym=False, checkpoint_format="awq"), {}),
    "awq-biased": (
        RTNConfig(group_size=64, sym=False, checkpoint_format="awq"),
        {"attention_bias": True, "mlp_bias": True, "dtype": torch.float16},
    ),
    "width-192": (GPTQConfig(group_size=64), {"hidden_size": 192, "intermediate_size": 320}),
}


# Through the flow, as their scales are in the norms of the export.
SCALED: dict[str, AWQConfig] = {
    "awq": AWQConfig(group_size=64),
    "awq-sym": AWQConfig(group_size=32, sym=True),
}


@dataclass(frozen=True)
class Loaded:
    """What a client made of one export, and the logits that our own reading of it gives; of an awq export also those of
    our reading with its linears rounded to float16, where the client's other modules compute in float32.
    """

    answer: dict
    logits: dict[str, Tensor]
    expected: Tensor
    rounded: Tensor | None


def ask_client(loader: str, exports: dict[str, Path], input_ids: list[list[int]], scratch: Path) -> dict[str, Loaded]:
    """Load all `exports` with one process of the client; by name."""
    models = {
        str(path): {"input_ids": input_ids, "logits": str(scratch / f"{name}.safetensors")}
        for name, path in exports.items()
    }
    request, answer = scratch / "request.json", scratch / "answer.json"
    request.write_text(json.dumps({"loader": loader, "answer": str(answer), "models": models}))
    command = [client_python(), CLIENT_SCRIPT, request]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CLIENT_SECONDS, env=os.environ | CLIENT_VARIABLES
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(answer.read_text())
    loaded = {}
    for name, path in exports.items():
        assert answers[str(path)]["error"] is None, f"{name}:\n{answers[str(path)]['error']}"
        model, rounded = dense_model(path), None
        with torch.inference_mode():
            expected = model(torch.tensor(input_ids)).logits
            if loader == "transformers" and name.startswith("awq"):
                rounded = with_half_linears(model)(torch.tensor(input_ids)).logits
        loaded[name] = Loaded(answers[str(path)], load_file(scratch / f"{name}.safetensors"), expected, rounded)
    return loaded


def with_half_linears(model: torch.nn.Module) -> torch.nn.Module:
    """`model`, changed to round what enters and leaves the linears of its layers, and their weights, to float16."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.weight.data = module.weight.data.half().float()
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].half().float(),))
            module.register_forward_hook(lambda _, inputs, output: output.half().float())
    return model


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def assert_no_keys_astray(loaded: Loaded) -> None:
    assert loaded.answer["missing"] == []
    assert loaded.answer["unexpected"] == []


def assert_replaced(loaded: Loaded, layers: int, name: str = "") -> None:
    assert len(loaded.answer["classes"]) == 7 * layers
    assert set(loaded.answer["classes"].values()) == {AWQ_CLIENT_CLASS if name.startswith("awq") else CLIENT_CLASS}


def assert_close_logits(loaded: Loaded, name: str, tolerance: float) -> None:
    if name.startswith("awq"):
        assert relative_error(loaded.logits["loaded"], loaded.expected) < AWQ_TOLERANCE
        if loaded.rounded is not None:
            assert relative_error(loaded.logits["loaded"], loaded.rounded) < ROUNDED_AWQ_TOLERANCE
    else:
        assert relative_error(loaded.logits["loaded"], loaded.expected) < tolerance
        assert_same_logits(loaded)


def assert_same_logits(loaded: Loaded) -> None:
    assert relative_error(loaded.logits["widened"], loaded.expected) < WIDENED_TOLERANCE
    assert torch.equal(loaded.logits["widened"].argmax(-1), loaded.expected.argmax(-1))


TINY_IDS = [[(7 * i + 3) % 256 for i in range(32)], [(11 * i + 5) % 256 for i in range(32)]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory, prefect_server) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    sources: dict[str, Path] = {}
    paths = {}
    for name, (config, options) in EXPORTS.items():
        kind = json.dumps(options, default=str)
        if kind not in sources:
            shape = {"hidden_size": 128, "intermediate_size": 256} | options
            sources[kind] = write_tiny_llama(root / f"source-{len(sources)}", **shape)
        paths[name] = root / name
        write_packed(sources[kind], paths[name], config)
    for name, scaled in SCALED.items():
        job = tiny_job(sources["{}"], root, quantization=scaled, output=name, root=f"{name}-checkpoint")
        paths[name] = Path(quantize_model(job).output)
    return paths


@pytest.fixture(scope="module")
def through_transformers(exports, tmp_path_factory) -> dict[str, Loaded]:
    return ask_client("transformers", exports, TINY_IDS, tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def through_gptqmodel(exports, tmp_path_factory) -> dict[str, Loaded]:
    return ask_client("gptqmodel", exports, TINY_IDS, tmp_path_factory.mktemp("gptqmodel"))


@pytest.mark.parametrize("name", [*EXPORTS, *SCALED])
def test_transformers_computes_what_our_export_says(through_transformers, name):
    loaded = through_transformers[name]
    assert_no_keys_astray(loaded)
    assert_replaced(loaded, 2, name)
    assert_close_logits(loaded, name, LOADED_TOLERANCE)


@pytest.mark.parametrize("name", [*EXPORTS, *SCALED])
def test_gptqmodel_computes_what_our_export_says(through_gptqmodel, name):
    loaded = through_gptqmodel[name]
    assert_replaced(loaded, 2, name)
    assert_close_logits(loaded, name, HALF_TOLERANCE)


@pytest.fixture(scope="module")
def smollm2_export(tmp_path_factory) -> Path:
    """SmolLM2-135M through the whole flow: 4 bit GPTQ, groups of 64."""
    place = tmp_path_factory.mktemp("smollm2")
    report = quantize_model(
        QuantizationJob(
            model=str(demo_model(print)),
            output=str(place / "export"),
            quantization=GPTQConfig(group_size=64),
            calibration=CalibrationConfig(data=str(CALIBRATION_TEXT), samples=4, sequence_length=256),
            checkpoint=CheckpointConfig(path=str(place / "checkpoint")),
        )
    )
    return Path(report.output)


@pytest.mark.parametrize("loader", ["transformers", "gptqmodel"])
def test_a_real_model_that_ran_through_the_flow_loads_and_computes_what_it_says(loader, smollm2_export, tmp_path):
    text_ids = AutoTokenizer.from_pretrained(smollm2_export)(HELD_OUT_TEXT.read_text()[:2000])["input_ids"][:64]
    loaded = ask_client(loader, {"smollm2": smollm2_export}, [text_ids], tmp_path)["smollm2"]
    assert_replaced(loaded, layers=30)
    assert_same_logits(loaded)
    if loader == "transformers":
        assert_no_keys_astray(loaded)
        assert relative_error(loaded.logits["loaded"], loaded.expected) < LOADED_TOLERANCE
        assert torch.equal(loaded.logits["loaded"].argmax(-1), loaded.expected.argmax(-1))
