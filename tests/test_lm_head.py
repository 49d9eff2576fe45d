"""A quantized output head: a step after the layers, with a record of its own, from what enters the head behind them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model
from tasks.formats import gptq as gptq_layout
from tasks.methods import gptq, rtn
from tasks.models.decoder import Decoder
from tasks.models.replay import ReplayError, check_replay
from tasks.models.source import INDEX_FILE, SourceModel
from tasks.preflight import PreflightError, check
from tasks.quantization import EoRAConfig, FP8Config, GPTQConfig, Quantization, RTNConfig
from tests.flow_jobs import Exports, contents, last_flow_run, layer_task_states, layers_run, tensors_of, tiny_job
from tests.layer_runs import open_run
from tests.loaded_exports import logits, relative_difference
from tests.test_clients import HALF_TOLERANCE, TINY_IDS, ask_client, assert_close_logits
from tests.test_schemes import PowerCut, power_cut
from tests.tiny_families import FAMILIES, write_tiny
from tests.tiny_models import write_tiny_llama

LAYERS = 2
RULE = {"lm_head": {"bits": 8, "group_size": 32}}
CONFIGS: dict[str, Quantization] = {
    "gptq": GPTQConfig(group_size=32, lm_head=True, dynamic=RULE),
    "gptq at once": GPTQConfig(group_size=32, lm_head=True, true_sequential=False),
    "rtn": RTNConfig(group_size=32, lm_head=True, dynamic=RULE),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32: between layers nothing is rounded, so that a plain forward is what a run sees."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, dtype=torch.float32)


@pytest.fixture(scope="module")
def exports(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Exports:
    return Exports(lambda name: tiny_job(model, tmp_path_factory.mktemp("whole"), quantization=CONFIGS[name]))


@pytest.mark.parametrize("modules", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_cut_short_in_its_head_does_the_head_alone_again(
    name: str, modules: int, model: Path, exports: dict[str, Path], tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIGS[name], devices=("cpu", "cpu"))
    with power_cut(LAYERS, modules), pytest.raises(PowerCut):
        quantize_model(job)
    with layers_run() as ran:
        assert quantize_model(job).resumed_from == LAYERS
    assert ran == [LAYERS]
    assert layer_task_states(last_flow_run().id) == ["Cached"] * LAYERS + ["Completed"]
    assert contents(job.output) == contents(exports[name])


def test_a_run_cut_short_in_a_layer_goes_on_to_the_head(model: Path, exports: dict[str, Path], tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIGS["gptq"], interval="layer:2")
    with power_cut(1, 3), pytest.raises(PowerCut):
        quantize_model(job)
    report = quantize_model(job)
    assert [layer.name for layer in report.layers] == ["model.layers.0", "model.layers.1", "lm_head"]
    assert [module.name for module in report.layers[-1].modules] == ["lm_head"]
    assert contents(job.output) == contents(exports["gptq"])


@pytest.mark.parametrize("name", ["gptq", "gptq at once"])
def test_hidden_states_in_files_make_no_difference(
    name: str, model: Path, exports: dict[str, Path], tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIGS[name]).model_copy(update={"hidden_states_limit": 0})
    with power_cut(LAYERS, 0), pytest.raises(PowerCut):
        quantize_model(job)
    quantize_model(job)
    assert contents(job.output) == contents(exports[name])


@pytest.mark.parametrize("name", ["gptq", "gptq at once"])
def test_the_head_is_quantized_by_what_enters_it_behind_the_quantized_layers(
    name: str, model: Path, exports: dict[str, Path], tmp_path: Path
) -> None:
    config = GPTQConfig(bits=8, group_size=32) if name == "gptq" else GPTQConfig(group_size=32)
    quantized = dense_model(exports[name])
    with open_run(tiny_job(model, tmp_path)) as run:
        assert run.calibration is not None
        seen = []
        for batch in run.calibration.batches:
            with torch.no_grad():
                normed = quantized.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
            seen.append(normed[batch.attention_mask.bool()].double())
    x_TK = torch.cat(seen)
    factor = gptq.factor_hessian(2 / len(x_TK) * x_TK.t() @ x_TK, config)
    weight = load_file(model / "model.safetensors")["lm_head.weight"]
    expected = gptq.quantize_rows(weight, factor, config)
    unpacked = gptq_layout.unpack(tensors_of(exports[name]), "lm_head", config)
    # At 8 bits the last bits of sums tip many of 256 codes.
    assert (unpacked.codes_NK == expected.codes_NK).float().mean() > (0.99 if name == "gptq" else 0.999)
    assert not torch.equal(unpacked.codes_NK, rtn.quantize_rows(weight, config).codes_NK)


def test_rounding_to_nearest_needs_nothing_but_the_head(model: Path, exports: dict[str, Path]) -> None:
    config = RTNConfig(bits=8, group_size=32)
    expected = rtn.quantize_rows(load_file(model / "model.safetensors")["lm_head.weight"], config)
    unpacked = gptq_layout.unpack(tensors_of(exports["rtn"]), "lm_head", config)
    assert unpacked.codes_NK.equal(expected.codes_NK) and unpacked.scales_NG.equal(expected.scales_NG)


def test_the_export_holds_the_head_once_and_says_so(model: Path, exports: dict[str, Path]) -> None:
    for name, output in ((name, exports[name]) for name in CONFIGS):
        index = json.loads((output / INDEX_FILE).read_text())["weight_map"]
        held = {tensor for tensor in index if tensor.startswith("lm_head.")}
        assert held == {f"lm_head.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        with safe_open(output / index["lm_head.qweight"], "pt") as shard:
            assert set(shard.keys()) == held
        described = json.loads((output / "config.json").read_text())["quantization_config"]
        assert described["lm_head"] is True and described.get("dynamic", {}) == (RULE if CONFIGS[name].dynamic else {})
        assert relative_difference(logits(dense_model(output)), logits(dense_model(model))) < 0.5


def test_a_plan_foretells_the_bytes(model: Path, exports: dict[str, Path], tmp_path: Path) -> None:
    plan = check(tiny_job(model, tmp_path, quantization=CONFIGS["gptq"]))
    written = tensors_of(exports["gptq"])
    assert {kind.name: kind.bytes_after for kind in plan.modules}["lm_head"] == sum(
        tensor.nbytes for name, tensor in written.items() if name.startswith("lm_head.")
    )
    assert plan.bytes_after == sum(tensor.nbytes for tensor in written.values())
    assert any("transformers does not load a quantized head" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("tied", "quantization", "changes", "reason"),
    [
        (True, GPTQConfig(group_size=32, lm_head=True), {}, "tie_word_embeddings"),
        (False, GPTQConfig(group_size=32, lm_head=True), {"adapter": EoRAConfig(rank=4)}, "is made for layers only"),
        (False, RTNConfig(group_size=32, lm_head=True, dynamic={"lm_head": {"group_size": 48}}), {}, "`lm_head`"),
        (False, RTNConfig(group_size=32, dynamic={"lm_head": {"bits": 8}}), {}, "matches no linear"),
        (
            False,
            RTNConfig(group_size=32, lm_head=True, dynamic={"-:lm_head": {}}),
            {},
            "rules leave `lm_head` as it is",
        ),
    ],
)
def test_heads_that_can_not_be_quantized_are_refused_before_anything_is_spent(
    tied: bool, quantization: Quantization, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "model", tied=tied)
    with pytest.raises(PreflightError) as refused:
        check(tiny_job(model, tmp_path, quantization=quantization).model_copy(update=changes))
    assert [reason in problem for problem in refused.value.problems] == [True], refused.value.problems


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "quantization",
    [
        RTNConfig(group_size=32, dynamic={"-:lm_head": {}}),
        RTNConfig(
            group_size=32, checkpoint_format="compressed-tensors", dynamic={".*down_proj": {"bits": 8}, "-:.*head": {}}
        ),
        FP8Config(dynamic={"-:lm_head": {}}),
    ],
    ids=["rtn", "compressed-tensors", "fp8"],
)
def test_a_rule_may_leave_a_head_that_is_not_quantized_anyway(tied: bool, quantization: Any, tmp_path: Path) -> None:
    """Rules written for GPTQModel often end with it."""
    model = write_tiny_llama(tmp_path / "model", tied=tied)
    with_rule = tiny_job(model, tmp_path / "with rule", quantization=quantization)
    others = tuple(rule for rule in quantization.dynamic if "head" not in rule.pattern)
    without = tiny_job(model, tmp_path / "without", quantization=quantization.model_copy(update={"dynamic": others}))
    for job in (with_rule, without):
        quantize_model(job)
    one, other = (tensors_of(Path(job.output)) for job in (with_rule, without))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_rule_that_leaves_the_head_after_one_that_matches_it_is_without_effect(tmp_path: Path) -> None:
    rules = {".*": {"bits": 8}, "-:lm_head": {}}
    with pytest.raises(PreflightError, match="rule `-:lm_head` matches no linear in a layer"):
        check(
            tiny_job(
                write_tiny_llama(tmp_path / "model"), tmp_path, quantization=RTNConfig(group_size=32, dynamic=rules)
            )
        )


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq"])
def test_layouts_without_readers_for_a_quantized_head_are_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match="no readers for a quantized head"):
        RTNConfig(lm_head=True, checkpoint_format=layout)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_enters_the_head_is_what_transformers_gives_it(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model", tie_word_embeddings=False)
    decoder = Decoder.from_source(SourceModel.open(str(model)), quantizes_head=True)
    check_replay(decoder)


def test_a_norm_that_is_left_out_before_the_head_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.models import replay

    decoder = Decoder.from_source(SourceModel.open(str(model)), quantizes_head=True)
    monkeypatch.setattr(replay, "_head_input", lambda _, hidden_BTH: hidden_BTH)
    with pytest.raises(ReplayError, match="input of the head differs"):
        check_replay(decoder)


@pytest.mark.slow
def test_gptqmodel_loads_a_quantized_head_and_transformers_makes_up_another(
    tmp_path: Path, prefect_server: None
) -> None:
    model = write_tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=256)
    job = tiny_job(model, tmp_path, quantization=CONFIGS["gptq"])
    output = Path(quantize_model(job).output)
    loaded = ask_client("gptqmodel", {"head": output}, TINY_IDS, tmp_path)["head"]
    assert_close_logits(loaded, "head", HALF_TOLERANCE)
    # As preflight says of it.
    assert ask_client("transformers", {"head": output}, TINY_IDS, tmp_path)["head"].answer["missing"] == [
        "lm_head.weight"
    ]
