"""Families in .gguf files: transformers and llama.cpp compute from a file what the model of the same weights computes."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tasks import preflight
from tasks.evaluate import dense_model
from tasks.formats.gguf_families import FAMILIES, context_length, problems
from tasks.formats.gguf_plan import make_plan
from tasks.gguf_scheme import GGUFScheme
from tasks.models.families import SUPPORTED
from tasks.models.source import SourceModel
from tasks.output_directory import GGUF_FILE
from tasks.quantization import GGUFConfig
from tests.flow_jobs import tiny_job
from tests.gguf_families import MODELS, dense_of, write_gguf, write_model
from tests.llamacpp import ask_llamacpp
from tests.test_family_flow import stopped_and_whole
from tests.tiny_families import COMMON, write_tiny
from tests.tiny_families import FAMILIES as TINY
from tests.tiny_models import LLAMA3_ROPE, TEXTS

# Weights are float32 in the file; llama.cpp keeps keys and values of attention in float16. gemma's logits are the largest.
LOG_PROBABILITY_TOLERANCE = 0.05
READ_BY_TRANSFORMERS = ["mistral", "phi3", "qwen2", "qwen2 tied", "qwen3", "starcoder2", "stablelm"]


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_computes_what_we_say_the_file_holds(name: str, tmp_path: Path) -> None:
    source_path = write_model(name, tmp_path / "source")
    dense = write_gguf(source_path, tmp_path / GGUF_FILE)
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=GGUF_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(told.values())
    ids = AutoTokenizer.from_pretrained(source_path)(TEXTS[0], return_tensors="pt").input_ids[:, :24]
    with torch.no_grad():
        expected = dense_of(source_path, dense)(ids).logits
        assert torch.equal(loaded.eval()(ids).logits, expected)
        assert torch.equal(dense_model(tmp_path)(ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llamacpp_computes_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.formats.gguf_plan._actual", lambda intended, shape: "f32")
    source_path = write_model(name, tmp_path / "source")
    dense = write_gguf(source_path, tmp_path / GGUF_FILE)
    tokenizer, model = AutoTokenizer.from_pretrained(source_path), dense_of(source_path, dense)
    prompts = [text[: len(text) - cut] for text in TEXTS for cut in (0, 7, 19)]
    answers = ask_llamacpp(tmp_path, tmp_path / GGUF_FILE, prompts)
    assert sum(bool(answer["steps"]) for answer in answers) >= 5
    for text, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert answer["tokens"] == ids.shape[1]
        if answer["steps"]:
            with torch.no_grad():
                expected_V = model(ids).logits[0, -1].log_softmax(dim=0)
            for token, value in answer["steps"][0].items():
                assert value == pytest.approx(float(expected_V[int(token)]), abs=LOG_PROBABILITY_TOLERANCE)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(("name", "lost"), [("gemma2", "is of the architecture gemma2"), ("mixtral", "is a mixture")])
def test_norms_and_experts_are_stopped_gone_on_with_and_held_whole(name: str, lost: str, tmp_path: Path) -> None:
    source_path = write_model(name, tmp_path / "source")
    job = stopped_and_whole(source_path, tmp_path, GGUFConfig(quant_type="q8_0"))
    source = SourceModel.open(str(source_path))
    held = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in tensors_of(job.output)}
    for whole, parts in GGUFScheme(GGUFConfig(quant_type="q8_0"), source).plan.stored:
        tensors = [source.load([part.source])[part.source].float() for part in parts if part.source is not None]
        expected = tensors[0] if whole.stack is None else torch.stack(tensors)
        if ".attn_q." in whole.name or ".attn_k." in whole.name:  # a row is known by its sums, wherever it lies
            expected, held[whole.name] = (t.sum(dim=1).sort().values for t in (expected, held[whole.name]))
        offset = name == "gemma2" and "norm" in whole.name
        torch.testing.assert_close(held.pop(whole.name), expected + offset, rtol=0.02, atol=0.02)
    assert not held
    with pytest.raises(ValueError, match=f"{lost}.*which transformers does not read"):
        dense_model(job.output)


def test_experts_lie_in_the_order_of_their_numbers_in_one_tensor_of_one_type(tmp_path: Path) -> None:
    source = SourceModel.open(str(write_model("qwen3_moe", tmp_path / "source")))
    scheme = GGUFScheme(GGUFConfig(quant_type="q8_0"), source)
    whole, parts = next(pair for pair in scheme.plan.stored if pair[0].name == "blk.1.ffn_down_exps.weight")
    assert (whole.shape, len(parts)) == ((12, 64, 32), 12)
    assert [part.source for part in parts] == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(12)]
    assert scheme.entries["model.layers.1.mlp.gate.weight"].actual == "f32"
    assert sum("exps" in line for line in scheme.plan.table().splitlines()) == 3 * 3
    rules = {r".*experts\.11\.down_proj": {"quant_type": "q4_0"}}
    with pytest.raises(
        ValueError, match=r"other experts of that layer the types q8_0 and q4_0; .* one tensor of one type"
    ):
        _ = GGUFScheme(GGUFConfig(quant_type="q8_0", dynamic=rules), source).plan


def test_a_mixture_of_eight_experts_gets_more_bits_outside_them(tmp_path: Path) -> None:
    shapes = {f"model.layers.0.self_attn.{name}_proj.weight": (256, 256) for name in "qkvo"}
    for experts, expected in {8: ["q4_k", "q8_0", "q8_0", "q5_k"], 4: ["q4_k", "q4_k", "q5_k", "q4_k"]}.items():
        plan = make_plan(GGUFConfig(quant_type="q4_k_s"), config_of("mixtral", num_local_experts=experts), shapes)
        assert [tensor.actual for tensor in plan.tensors] == expected


def tensors_of(output: str) -> list[Any]:
    return list(gguf.GGUFReader(Path(output) / GGUF_FILE).tensors)


def test_every_family_of_the_export_is_one_of_the_decoders() -> None:
    assert FAMILIES.keys() <= SUPPORTED
    assert {family for family, _ in MODELS.values()} == FAMILIES.keys() - {"llama"}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    family, options = MODELS[name]
    config: dict[str, Any] = AutoConfig.for_model(family, **(COMMON | TINY[family] | options)).to_dict()
    return config | changes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "not 'yarn'"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "not 'longrope'"),
        ("qwen2", {"hidden_act": "gelu"}, "compute silu"),
        ("gemma2", {"hidden_activation": "relu"}, "compute gelu_pytorch_tanh"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "scale attention by 16"),
        ("gemma2", {"attn_logit_softcapping": None}, "cap the logits"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "but each second"),
        ("gemma2", {"tie_word_embeddings": False}, "take the embedding for the head"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "cap no logits"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "look back only"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 7}, "but each sixth"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 100.0}}}, "by 10000, unscaled"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, "but each fourth"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "want experts in every layer"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "want experts in every layer"),
        ("qwen3_moe", {"norm_topk_prob": False}, "take norm_topk_prob for true"),
        ("olmoe", {"norm_topk_prob": True}, "take norm_topk_prob for false"),
        ("olmoe", {"num_key_value_heads": 2}, "as many key-value heads as heads"),
        ("olmoe", {"clip_qkv": 8.0}, "clip no values"),
        ("starcoder2", {"use_bias": False}, "want biases everywhere"),
        ("stablelm", {"qk_layernorm": True}, "without qk_layernorm"),
        ("stablelm", {"tie_word_embeddings": True}, "want a head beside the embedding"),
        ("olmo2", {"tie_word_embeddings": True}, "want a head beside the embedding"),
    ],
)
def test_models_that_readers_would_compute_otherwise_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    assert list(problems(config_of(name))) == []
    (told,) = problems(config_of(name, **changes))
    assert message in told


def test_a_bias_that_readers_do_not_look_for_is_refused_by_name() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.bias": (64,)}
    assert make_plan(GGUFConfig(), config_of("qwen2"), shapes).tensors[0].name == "blk.0.attn_q.bias"
    with pytest.raises(ValueError, match=r"no name in a qwen3 .gguf file: model.layers.0.self_attn.q_proj.bias"):
        make_plan(GGUFConfig(), config_of("qwen3"), shapes)


def test_the_context_ends_with_a_window_that_readers_do_not_know(tmp_path: Path) -> None:
    model = write_tiny("mistral", tmp_path / "model", sliding_window=100)
    plan = preflight.check(tiny_job(model, tmp_path, quantization=GGUFConfig(quant_type="q8_0")))
    assert any("the file gives 100 tokens of context" in note for note in plan.notes)
    assert context_length(config_of("mistral", sliding_window=100)) == 100
    assert context_length(config_of("gemma2", sliding_window=100, max_position_embeddings=256)) == 256
    off = {"sliding_window": 100, "use_sliding_window": False, "max_position_embeddings": 256}
    assert context_length(config_of("qwen2", **off)) == 256


def test_a_config_that_leaves_out_what_its_family_takes_for_granted_is_the_same_model(tmp_path: Path) -> None:
    path = write_model("gemma2", tmp_path / "model")
    whole = GGUFScheme(GGUFConfig(), SourceModel.open(str(path))).model_config
    config = json.loads((path / "config.json").read_text())
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "layer_types"):
        del config[name]
    (path / "config.json").write_text(json.dumps(config))
    assert GGUFScheme(GGUFConfig(), SourceModel.open(str(path))).model_config == whole


@pytest.mark.parametrize(
    ("family", "options", "lost"),
    [
        ("llama", {"rope_parameters": LLAMA3_ROPE}, "scales its rotary embeddings"),
        ("llama", {"attention_bias": True}, "biases"),
        ("stablelm", {"qk_layernorm": False, "partial_rotary_factor": 0.5}, "rotates 8 columns of each head"),
        ("qwen3", {"head_dim": 16}, "has heads of 16 columns"),
        ("phi3", {"sliding_window": None}, "has 320 tokens, none of them number 32000"),
        ("granite", {}, "is of the architecture granite"),
    ],
)
def test_what_transformers_leaves_out_of_a_file_is_told_by_the_plan_and_not_judged_by_it(
    family: str, options: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    source_path = write_tiny(family, tmp_path / "source", **options)
    plan = preflight.check(tiny_job(source_path, tmp_path, quantization=GGUFConfig(quant_type="q8_0")))
    (note,) = [note for note in plan.notes if "transformers" in note]
    assert lost in note and "5.24.0" in note and "llama.cpp" in note
    write_gguf(source_path, tmp_path / GGUF_FILE)
    with pytest.raises(ValueError, match=f"{lost}.*which transformers does not read; judge it with llama"):
        dense_model(tmp_path)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_nothing_is_told_of_transformers_where_it_reads_the_file(name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path / "model")
    plan = preflight.check(tiny_job(model, tmp_path, quantization=GGUFConfig(quant_type="q8_0")))
    assert not any("transformers" in note for note in plan.notes)
