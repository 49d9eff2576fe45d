"""Exports of families beside llama in another program: what our own reading of the file says, experts one by one too."""

from pathlib import Path

import pytest

from flows.quantize_model import quantize_model
from tasks.quantization import AWQConfig, GPTQConfig, ParoQuantConfig, QQQConfig, Quantization, RTNConfig
from tasks.schemes import READ_ONE_BY_ONE, layout_name
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
    exports = {"qwen3_moe": packed("qwen3_moe", tmp_path, mlp_only_layers=[]), "gpt_oss": packed("gpt_oss", tmp_path)}
    for family, loaded in ask_client("gptqmodel", exports, IDS, tmp_path).items():
        assert list(loaded.answer["classes"].values()) == [CLIENT_CLASS] * 3 * (4 + 3 * 8), family
        assert relative_error(loaded.logits["widened"], loaded.expected) < WIDENED_TOLERANCE, family


@pytest.mark.usefixtures("prefect_server")
def test_gptqmodel_reads_experts_that_were_stacked_in_each_layout_that_is_allowed(tmp_path: Path) -> None:
    """Two experts, as large as qqq needs; and experts that a rule leaves, which are plain and one by one then."""
    model = write_tiny(
        "gpt_oss", tmp_path / "model", hidden_size=128, intermediate_size=128, head_dim=32, num_local_experts=2,
        num_experts_per_tok=1, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    made: dict[str, tuple[Quantization, float]] = {
        "gptq": (GPTQConfig(group_size=32, desc_act=True), WIDENED_TOLERANCE),
        "ruled": (RTNConfig(group_size=32, dynamic={"-:.*experts": {}}), WIDENED_TOLERANCE),
        "awq": (RTNConfig(group_size=32, checkpoint_format="awq"), AWQ_TOLERANCE),
        # These round tokens to 8 bits, and turn them in float16: see the tests of their flows.
        "qqq": (QQQConfig(group_size=-1), 6e-2),
        "paroquant": (ParoQuantConfig(group_size=64, rotation_epochs=1, finetune_epochs=1), 1e-2),
    }
    exports = {}
    for name, (quantization, _) in made.items():
        job = tiny_job(model, tmp_path / name, quantization=quantization)
        quantize_model(job)
        exports[name] = Path(job.output)
    assert {layout_name(quantization) for quantization, _ in made.values()} == set(READ_ONE_BY_ONE)
    for name, loaded in ask_client("gptqmodel", exports, IDS, tmp_path).items():
        plain = [module for module, kind in loaded.answer["classes"].items() if kind.startswith("torch.nn")]
        assert len(loaded.answer["classes"]) == 2 * (4 + 3 * 2), name
        assert len(plain) == (12 if name == "ruled" else 0) and all(".experts." in module for module in plain), name
        logits = loaded.logits.get("widened", loaded.logits["loaded"])
        assert relative_error(logits, loaded.expected) < made[name][1], name


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
