"""Exports of families beside llama in another program: what our own reading of the file says, experts one by one too."""

from pathlib import Path

import pytest

from flows.quantize_model import quantize_model
from tasks.quantization import RTNConfig
from tests.flow_jobs import tiny_job
from tests.packed_models import write_packed
from tests.test_clients import CLIENT_CLASS, WIDENED_TOLERANCE, ask_client, relative_error
from tests.tiny_families import write_tiny
from tests.tiny_wrapped import write_wrapped

pytestmark = pytest.mark.slow

IDS = [[number * 37 % 311 for number in range(30)]]
DENSE = ("gemma2", "gemma3_text", "olmo2", "phi3", "qwen3")


def packed(family: str, place: Path, **options: object) -> Path:
    source = write_tiny(family, place / f"{family}-source", **options)
    write_packed(source, place / family, RTNConfig(group_size=32))
    return place / family


def test_transformers_loads_families_and_computes_what_their_exports_say(tmp_path: Path) -> None:
    exports = {family: packed(family, tmp_path) for family in DENSE}
    for family, loaded in ask_client("transformers", exports, IDS, tmp_path).items():
        assert set(loaded.answer["classes"].values()) == {CLIENT_CLASS}, family
        assert not loaded.answer["missing"] and not loaded.answer["unexpected"], family
        assert relative_error(loaded.logits["widened"], loaded.expected) < WIDENED_TOLERANCE, family


def test_gptqmodel_loads_experts_one_by_one_and_computes_what_the_export_says(tmp_path: Path) -> None:
    """All layers sparse: GPTQModel 7.7.0 leaves a dense layer of a mixture unquantized, with random weights."""
    exports = {"qwen3_moe": packed("qwen3_moe", tmp_path, mlp_only_layers=[])}
    loaded = ask_client("gptqmodel", exports, IDS, tmp_path)["qwen3_moe"]
    assert list(loaded.answer["classes"].values()) == [CLIENT_CLASS] * 3 * (4 + 3 * 8)
    assert relative_error(loaded.logits["widened"], loaded.expected) < WIDENED_TOLERANCE


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("loader", ["transformers", "gptqmodel"])
def test_gptq_files_of_a_wrapper_are_loaded_with_its_tower_as_it_was(loader: str, tmp_path: Path) -> None:
    """`mistral3`, for which GPTQModel 7.7.0 asks for no processor."""
    model = write_wrapped("mistral3", tmp_path / "model")
    job = tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32))
    quantize_model(job)
    loaded = ask_client(loader, {"mistral3": Path(job.output)}, IDS, tmp_path)["mistral3"]
    assert list(loaded.answer["classes"].values()) == [CLIENT_CLASS] * 3 * 7
    assert set(loaded.answer["vision"].values()) == {"torch.nn.modules.linear.Linear"}
    assert not loaded.answer["missing"] and not loaded.answer["unexpected"]
    assert relative_error(loaded.logits["widened"], loaded.expected) < WIDENED_TOLERANCE
