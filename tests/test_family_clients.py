"""Exports of families beside llama in another program: what our own reading of the file says, experts one by one too."""

from pathlib import Path

import pytest

from flows.quantize_model import quantize_model
from tasks.quantization import AWQConfig, RTNConfig
from tests.flow_jobs import tiny_job
from tests.packed_models import write_packed
from tests.test_clients import (
    AWQ_CLIENT_CLASS,
    AWQ_TOLERANCE,
    CLIENT_CLASS,
    WIDENED_TOLERANCE,
    ask_client,
    relative_error,
)
from tests.tiny_families import write_tiny

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
def test_gptqmodel_loads_experts_of_awq_and_computes_what_the_export_says(tmp_path: Path) -> None:
    """It computes in float16, by which a router may send a token elsewhere: all but a few must come to the same."""
    model = write_tiny("qwen3_moe", tmp_path / "model", mlp_only_layers=[])
    job = tiny_job(model, tmp_path, quantization=AWQConfig(group_size=32, n_grid=6))
    exports = {"awq": Path(quantize_model(job).output)}
    loaded = ask_client("gptqmodel", exports, IDS, tmp_path)["awq"]
    assert list(loaded.answer["classes"].values()) == [AWQ_CLIENT_CLASS] * 3 * (4 + 3 * 8)
    ours_TV, theirs_TV = loaded.expected[0], loaded.logits["widened"][0]
    errors = sorted(relative_error(theirs, ours) for theirs, ours in zip(theirs_TV, ours_TV, strict=True))
    assert errors[int(0.7 * len(errors))] < AWQ_TOLERANCE, errors
