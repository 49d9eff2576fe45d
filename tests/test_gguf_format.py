"""The .gguf layout, and the programs that load it. What llama.cpp itself says is among the slow tests."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tasks.formats import gguf as layout
from tasks.formats.gguf_plan import ROPE_FACTORS, GGUFPlan, TensorPlan, make_plan
from tasks.formats.gguf_tokenizer import TokenizerFields, tokenizer_fields
from tasks.gguf_scheme import GGUFScheme
from tasks.methods.grid import WeightError
from tasks.models.source import SourceModel
from tasks.quantization import GGUFConfig
from tests.llamacpp import ask_llamacpp
from tests.tiny_models import TEXTS, write_tiny_llama

SMALL = {"hidden_size": 256, "intermediate_size": 512}  # rows that K-quants fill
SMOLLM2_SHAPES = {
    "model.embed_tokens.weight": (49152, 576),
    "model.norm.weight": (576,),
    **{
        f"model.layers.{i}.{name}.weight": shape
        for i in range(30)
        for name, shape in {
            "input_layernorm": (576,),
            "mlp.down_proj": (576, 1536),
            "mlp.gate_proj": (1536, 576),
            "mlp.up_proj": (1536, 576),
            "post_attention_layernorm": (576,),
            "self_attn.k_proj": (192, 576),
            "self_attn.o_proj": (576, 576),
            "self_attn.q_proj": (576, 576),
            "self_attn.v_proj": (192, 576),
        }.items()
    },
}
SMOLLM2_CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}


def export(source_path: Path, target: Path, config: GGUFConfig) -> tuple[GGUFPlan, dict[str, Tensor]]:
    """Write `source_path` as `target`; the plan, and the dense weights by their source names, as we say readers see them."""
    source = SourceModel.open(str(source_path))
    shapes = {name: info.shape for name, info in source.tensors.items()}
    plan = make_plan(config, source.config, shapes)
    tokenizer = json.loads((source_path / "tokenizer.json").read_text())
    tokenizer_config = json.loads((source_path / "tokenizer_config.json").read_text())
    vocab_size = shapes["model.embed_tokens.weight"][0]
    fields = tokenizer_fields(tokenizer, tokenizer_config, source.config, vocab_size)
    file = layout.make_file(plan, source.config, fields, "tiny")
    dense = {}

    def load(entry: TensorPlan) -> Tensor:
        if entry.source is None:
            return layout.rope_factors(source.config)
        tensors = source.load([entry.source], "cpu")
        encoded, losses = layout.encode_all((entry,), tensors)
        dense[entry.source] = layout.decode(entry, encoded[entry.name])
        # Readers are compared with what is decoded here, so that must be the source's, rows in their order.
        error = dense[entry.source] - tensors[entry.source].float()
        assert float(error.square().mean()) == pytest.approx(losses[entry.name], rel=1e-3, abs=1e-12)
        return encoded[entry.name]

    with open(target, "wb") as written:
        for piece in file.pieces(load):
            written.write(piece)
    assert target.stat().st_size == file.size_bytes
    return plan, dense


def dense_model(source_path: Path, dense: dict[str, Tensor]) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(source_path, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


def token_ids(source_path: Path, count: int = 24) -> Tensor:
    return AutoTokenizer.from_pretrained(source_path)(TEXTS[0], return_tensors="pt").input_ids[:, :count]


# The plan


def test_the_mixes_give_the_layers_more_bits_that_llamacpp_gives_them():
    config = {**SMOLLM2_CONFIG, "hidden_size": 768}
    shapes = {name: (*shape[:-1], 768 if shape[-1] == 576 else shape[-1]) for name, shape in SMOLLM2_SHAPES.items()}
    shapes["lm_head.weight"] = (49152, 768)
    types = {t.name: t.actual for t in make_plan(GGUFConfig(quant_type="q4_k_m"), config, shapes).tensors}
    more_bits = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    for i in range(30):
        expected = "q6_k" if i in more_bits else "q4_k"
        assert types[f"blk.{i}.attn_v.weight"] == types[f"blk.{i}.ffn_down.weight"] == expected
        assert {types[f"blk.{i}.{n}.weight"] for n in ("attn_q", "attn_k", "attn_output", "ffn_up")} == {"q4_k"}
    assert (types["token_embd.weight"], types["output.weight"]) == ("q4_k", "q6_k")
    assert types["output_norm.weight"] == types["blk.0.attn_norm.weight"] == "f32"


@pytest.mark.parametrize(
    ("quant_type", "base", "head"),
    [("q4_0", "q4_0", "q6_k"), ("q5_0", "q5_0", "q6_k"), ("q8_0", "q8_0", "q8_0"), ("q6_k", "q6_k", "q6_k")],
)
def test_plain_types_give_all_but_a_tied_head_their_own(quant_type, base, head):
    shapes = {"model.embed_tokens.weight": (320, 256), "model.layers.0.mlp.down_proj.weight": (256, 512)}
    config = {**SMOLLM2_CONFIG, "num_hidden_layers": 1}
    plan = make_plan(GGUFConfig(quant_type=quant_type), config, shapes)
    assert [t.actual for t in plan.tensors] == [head, base]


def test_rows_that_no_block_fits_get_the_next_larger_type_and_the_table_tells():
    plan = make_plan(GGUFConfig(quant_type="q4_k_m"), SMOLLM2_CONFIG, SMOLLM2_SHAPES)
    types = {t.name: (t.intended, t.actual) for t in plan.tensors}
    assert types["token_embd.weight"] == ("q6_k", "q8_0")
    assert types["blk.3.attn_q.weight"] == ("q4_k", "q5_0")
    assert types["blk.0.attn_v.weight"] == ("q6_k", "q8_0")
    assert types["blk.3.ffn_down.weight"] == ("q4_k", "q4_k")
    assert len(plan.fallbacks) == 181
    lines = plan.table().splitlines()
    assert len(lines) == 1 + len(plan.tensors) + 1
    assert lines[1].split() == ["token_embd.weight", "49152x576", "q6_k", "q8_0", "30,081,024"]
    assert lines[-1] == "272 tensors, 103,668,480 bytes; 181 of them in a larger type than intended"


def test_rows_that_fill_not_even_a_small_block_stay_in_half_precision():
    shapes = {"model.layers.0.mlp.down_proj.weight": (64, 100), "model.layers.0.self_attn.q_proj.bias": (100,)}
    plan = make_plan(GGUFConfig(quant_type="q4_0"), SMOLLM2_CONFIG, shapes)
    assert [(t.intended, t.actual, t.size_bytes) for t in plan.tensors] == [("q4_0", "f16", 12800), ("f32", "f32", 400)]


def test_strict_refuses_fallbacks_by_name_and_says_what_would_fit():
    shapes = {"model.layers.0.mlp.up_proj.weight": (1536, 576), "model.layers.0.mlp.down_proj.weight": (576, 1536)}
    with pytest.raises(
        ValueError, match=r"up_proj.weight`: in_features 576 is not a multiple of 256.*q4_0.* would fit"
    ):
        make_plan(GGUFConfig(strict=True), SMOLLM2_CONFIG, shapes)
    del shapes["model.layers.0.mlp.up_proj.weight"]
    assert not make_plan(GGUFConfig(strict=True), SMOLLM2_CONFIG, shapes).fallbacks


def test_rotary_tables_of_old_checkpoints_are_left_out_of_the_plan(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    plain = GGUFScheme(GGUFConfig(quant_type="q8_0"), SourceModel.open(str(path))).plan
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(path / "model.safetensors") | table, path / "model.safetensors", {"format": "pt"})
    assert GGUFScheme(GGUFConfig(quant_type="q8_0"), SourceModel.open(str(path))).plan == plain


def test_tensors_without_a_name_in_the_format_are_refused():
    with pytest.raises(ValueError, match=r"1 tensors have no name.*model.layers.0.mtp.weight"):
        make_plan(GGUFConfig(), SMOLLM2_CONFIG, {**SMOLLM2_SHAPES, "model.layers.0.mtp.weight": (1, 1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "not 'gpt_neox'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "not 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "not 'dynamic'"),
        ({"hidden_act": "gelu"}, "compute silu"),
    ],
)
def test_models_that_readers_would_compute_otherwise_are_refused(change, message):
    assert layout.problems(SMOLLM2_CONFIG) == []
    (told,) = layout.problems({**SMOLLM2_CONFIG, **change})
    assert message in told


# The tensors


def test_rearranging_rows_commutes_with_encoding_them_and_is_undone_by_decoding():
    torch.manual_seed(0)
    weight_NK = torch.randn(64, 256)
    entry = TensorPlan("q", "blk.0.attn_q.weight", 0, (64, 256), "q8_0", "q8_0", heads=4)
    encoded, _ = layout.encode(entry, weight_NK)
    # Rows 0 and 8 of a head of 16 are rotated together: in the file they are neighbours.
    in_file_NK = layout.arrange(entry, weight_NK)
    assert torch.equal(in_file_NK[:4], weight_NK[[0, 8, 1, 9]]) and torch.equal(in_file_NK[16], weight_NK[16])
    assert torch.equal(layout.arrange(entry, encoded), layout.encode(entry, in_file_NK)[0])
    plain = TensorPlan("o", "blk.0.attn_output.weight", 0, (64, 256), "q8_0", "q8_0")
    assert torch.equal(layout.decode(entry, layout.arrange(entry, encoded)), layout.decode(plain, encoded))


@pytest.mark.parametrize("actual", ["f16", "f32", "q8_0"])
def test_damaged_values_are_refused_in_every_type(actual):
    entry = TensorPlan("w", "w", None, (2, 32), actual, actual)
    weight_NK = torch.ones(2, 32)
    weight_NK[1, 3] = float("nan") if actual == "f32" else 7e4
    with pytest.raises(WeightError):
        layout.encode(entry, weight_NK)


def test_a_tensor_encoded_for_another_plan_is_refused_by_name():
    entry = TensorPlan("w", "blk.0.ffn_up.weight", 0, (2, 32), "q8_0", "q8_0")
    file = layout.GGUFFile(b"", GGUFPlan("q8_0", 7, (entry,)))
    with pytest.raises(ValueError, match=r"`blk.0.ffn_up.weight` is planned as q8_0 .* another plan"):
        list(file.pieces(lambda _: torch.zeros(2, 36, dtype=torch.uint8)))


# Whole files


@pytest.mark.parametrize(
    ("quant_type", "options"),
    [
        ("q4_0", {}),
        ("q5_0", {"key_value_heads": 4}),
        ("q8_0", {"tied": True}),
        ("q4_k_m", {"layers": 3, **SMALL}),
        ("q4_k_m", {}),
        ("q5_k_m", {"tied": True, **SMALL}),
        ("q5_k_s", {}),
        ("q6_k", {"key_value_heads": 1, **SMALL}),
        ("q3_k_m", SMALL),
        ("q2_k", SMALL),
    ],
)
def test_transformers_computes_what_we_say_the_file_holds(tmp_path, quant_type, options):
    source_path = write_tiny_llama(tmp_path / "source", **options)
    plan, dense = export(source_path, tmp_path / "model.gguf", GGUFConfig(quant_type=quant_type))
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    ids = token_ids(source_path)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, dense_model(source_path, dense)(ids).logits)
    for entry in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        planned = next(t for t in plan.tensors if t.name == entry.name)
        assert entry.tensor_type.name.lower() == planned.actual
        assert tuple(reversed(entry.shape.tolist())) == planned.shape


def test_metadata_says_what_the_model_is(tmp_path):
    source_path = write_tiny_llama(tmp_path / "source", key_value_heads=1)
    export(source_path, tmp_path / "model.gguf", GGUFConfig(quant_type="q4_k_m"))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    held = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "tiny",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q4_K_M,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.vocab_size": 320,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {name: held[name] for name in expected} == expected
    assert held["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert str(tmp_path) not in str(held)
    assert all(entry.data_offset % 32 == 0 for entry in reader.tensors)


def test_rope_factors_divide_frequencies_as_transformers_scaling_does(tmp_path):
    source_path = write_tiny_llama(tmp_path / "source", llama3_rope=True, head_dim=64)
    model = AutoModelForCausalLM.from_pretrained(source_path)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    source = SourceModel.open(str(source_path))
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = layout.rope_factors(source.config)
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-5, atol=0)
    assert len(factors.unique()) > 1 and factors.min() == 1 and factors.max() == 8
    plan = make_plan(GGUFConfig(), source.config, {name: info.shape for name, info in source.tensors.items()})
    assert [t.name for t in plan.tensors if t.source is None] == [ROPE_FACTORS]


# The tokenizer


def tiny_fields(tmp_path: Path, vocab_size: int = 320, **changes: Any) -> TokenizerFields:
    source_path = write_tiny_llama(tmp_path / "source")
    tokenizer = json.loads((source_path / "tokenizer.json").read_text()) | changes
    tokenizer_config = json.loads((source_path / "tokenizer_config.json").read_text())
    return tokenizer_fields(tokenizer, tokenizer_config, {}, vocab_size)


def test_transformers_reads_the_same_tokenizer_from_the_file(tmp_path):
    source_path = write_tiny_llama(tmp_path / "source")
    export(source_path, tmp_path / "model.gguf", GGUFConfig(quant_type="q8_0"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = AutoTokenizer.from_pretrained(source_path)
    for text in [*TEXTS, "123 4567  don't\n\n\tüñí 漢字 🙂"]:
        ids = ours(text)["input_ids"]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


def test_rows_of_the_embedding_without_a_token_are_marked_unused(tmp_path):
    fields = tiny_fields(tmp_path, vocab_size=330)
    held = len([t for t in fields.types if t != gguf.TokenType.UNUSED])
    assert fields.tokens[held:] == tuple(f"[PAD{i}]" for i in range(held, 330))
    assert fields.types[:3] == (gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    with pytest.raises(ValueError, match="embedding only 100 rows"):
        tiny_fields(tmp_path, vocab_size=100)


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges", "name"),
    [
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}], False, "smollm"),
        ([r"\p{N}{1,3}"], True, "llama-bpe"),
        ([r"\p{N}{1,3}"], False, "smaug-bpe"),
        ([r"\p{N}"], False, "qwen2"),
        ([r"\p{N}{1,4}"], False, None),
        ([{"type": "Whitespace"}, {"type": "ByteLevel", "use_regex": False}], False, None),
    ],
)
def test_rules_that_cut_text_are_told_by_name_or_refused(tmp_path, pre_tokenizer, ignore_merges, name):
    if isinstance(pre_tokenizer[0], str):
        regex = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + pre_tokenizer[0]
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        pre_tokenizer = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": [], "ignore_merges": ignore_merges}
    tokenizer = {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizer}}
    if name is None:
        with pytest.raises(ValueError, match=r"no reader of .gguf files is known to have"):
            tokenizer_fields(tokenizer, {}, {}, 1)
    else:
        assert tokenizer_fields(tokenizer, {}, {}, 1).pre == name


def test_special_tokens_come_from_the_tokenizers_texts_and_else_from_the_config(tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0, "<s>": 1, "</s>": 2}, "merges": []}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "post_processor": template}
    config = {"bos_token_id": 0, "eos_token_id": [2, 0]}
    fields = tokenizer_fields(tokenizer, {"bos_token": {"content": "<s>"}}, config, 3, "{{ messages }}")
    assert fields.special_ids == {"bos": 1, "eos": 2}
    assert fields.adds_bos and not fields.adds_eos
    assert fields.chat_template == "{{ messages }}"


def write_sentencepiece_like_tokenizer(source_path: Path) -> None:
    """Replace the tokenizer by BPE over characters with bytes as a last resort, as llama 2 has it."""
    bytes_256 = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_256], show_progress=False
    )
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["content"] not in bytes_256]
    parsed["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (source_path / "tokenizer.json").write_text(json.dumps(parsed))


def test_characters_with_bytes_as_a_last_resort_become_the_llama_kind(tmp_path):
    source_path = write_tiny_llama(tmp_path / "source")
    write_sentencepiece_like_tokenizer(source_path)
    tokenizer = json.loads((source_path / "tokenizer.json").read_text())
    fields = tokenizer_fields(tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}, {}, 512)
    assert (fields.kind, fields.pre, fields.merges) == ("llama", "", ())
    assert fields.types[:5] == (
        gguf.TokenType.UNKNOWN,
        *[gguf.TokenType.CONTROL] * 2,
        *[gguf.TokenType.BYTE] * 2,
    )
    assert fields.adds_bos and fields.adds_space_prefix
    first_merge = "".join(tokenizer["model"]["merges"][0])
    assert fields.scores[fields.tokens.index(first_merge)] == 0 == max(fields.scores)


# llama.cpp


@pytest.mark.slow
def test_llamacpp_cuts_text_as_a_tokenizer_of_the_llama_kind_does(tmp_path):
    source_path = write_tiny_llama(tmp_path / "source", vocab_size=512)
    write_sentencepiece_like_tokenizer(source_path)
    export(source_path, tmp_path / "model.gguf", GGUFConfig(quant_type="q8_0"))
    tokenizer = Tokenizer.from_file(str(source_path / "tokenizer.json"))
    prompts = [*TEXTS, "never seen: üñí 漢字 🙂"]
    texts = ask_llamacpp(tmp_path, tmp_path / "model.gguf", prompts)
    ids = ask_llamacpp(tmp_path, tmp_path / "model.gguf", [tokenizer.encode(prompt).ids for prompt in prompts])
    for from_text, from_ids in zip(texts, ids, strict=True):
        assert from_text["tokens"] == from_ids["tokens"]
        assert from_text["steps"] == from_ids["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quant_type", "options"),
    [
        ("q8_0", {"attention_bias": True, "mlp_bias": True}),
        ("q4_k_m", {"tied": True, **SMALL}),
        ("q6_k", {"llama3_rope": True, "key_value_heads": 4, **SMALL}),
        ("q5_k_s", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, **SMALL}),
        ("q3_k_m", SMALL),
        ("q2_k", SMALL),
        ("q5_0", {}),
        ("q4_0", {}),
    ],
)
def test_llamacpp_computes_what_we_say_the_file_holds(tmp_path, quant_type, options):
    source_path = write_tiny_llama(tmp_path / "source", **options)
    _, dense = export(source_path, tmp_path / "model.gguf", GGUFConfig(quant_type=quant_type))
    tokenizer = AutoTokenizer.from_pretrained(source_path)
    model = dense_model(source_path, dense)
    prompts = [text[: len(text) - cut] for text in TEXTS for cut in (0, 7, 19)]
    answers = ask_llamacpp(tmp_path, tmp_path / "model.gguf", prompts)
    assert sum(bool(answer["steps"]) for answer in answers) >= 5
    for text, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert answer["tokens"] == ids.shape[1]
        if not answer["steps"]:
            continue
        with torch.no_grad():
            expected_V = model(ids).logits[0, -1].log_softmax(dim=0)
        theirs = {int(token): value for token, value in answer["steps"][0].items()}
        # It rounds activations to 8 bits before every product, so log-probabilities differ by some hundredths.
        for token, value in theirs.items():
            assert value == pytest.approx(float(expected_V[token]), abs=0.25)
        margin = expected_V.topk(2).values.diff().abs().item()
        assert margin < 0.25 or max(theirs, key=theirs.__getitem__) == int(expected_V.argmax())
