"""The tokenizer as a .gguf file holds it: token texts in order of their ids, merges, kinds, special ids, chat template.

Readers of .gguf files know no `tokenizer.json`. They have two tokenizers that llama models use, and the file names one:

* `gpt2`: byte-level BPE. The text is first cut by rules that readers have built in under names (`tokenizer.ggml.pre`);
  the same merges after other cuts give other tokens, so a `tokenizer.json` whose rules have no known name is refused.
* `llama`: BPE over characters with bytes as a last resort, as SentencePiece has it. Readers join whatever pair has the
  highest score, so scores are made from the order of the merges.

The model's embedding may have more rows than the tokenizer has tokens: the rest are named `[PADn]` and marked unused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNREACHABLE_SCORE = -1e9  # of tokens that no merge makes: text that looks like them must not be joined into them

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL_SPLIT = "byte-level split"
SINGLE_DIGITS = "single digits"
# Rules that cut the text, in order, and whether whole words skip the merges: the name that readers have for them.
PRE_TOKENIZERS = {
    ((BYTE_LEVEL_SPLIT,), False): "gpt-2",
    ((SINGLE_DIGITS, BYTE_LEVEL_SPLIT), False): "smollm",
    ((_CONTRACTIONS + r"\p{N}{1,3}" + _REST,), True): "llama-bpe",
    ((_CONTRACTIONS + r"\p{N}{1,3}" + _REST,), False): "smaug-bpe",
    ((_CONTRACTIONS + r"\p{N}" + _REST,), False): "qwen2",
}


@dataclass(frozen=True)
class TokenizerFields:
    """What goes into the file. `pre` is empty and `scores` filled for the `llama` kind; `gpt2` has it the other way."""

    kind: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    special_ids: dict[str, int] = field(default_factory=dict)  # bos, eos, unk, pad
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space_prefix: bool = False
    chat_template: str | None = None


def tokenizer_fields(
    tokenizer: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    vocab_size: int,
    chat_template: str | None = None,
) -> TokenizerFields:
    """Translate the parsed `tokenizer.json`, `tokenizer_config.json` and `config.json`.

    `vocab_size` is the number of rows of the embedding. `chat_template` is that of `chat_template.jinja`; the one in
    `tokenizer_config` is taken where it is None. ValueError for a tokenizer that readers of .gguf files don't have.
    """
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"the tokenizer is a {model['type']} model; gguf export knows BPE ones only")
    has_bytes = bool(model.get("byte_fallback"))
    added = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    texts = {index: text for text, index in model["vocab"].items()} | {
        i: token["content"] for i, token in added.items()
    }
    if max(texts) >= vocab_size:
        raise ValueError(
            f"the tokenizer has token {max(texts)} (`{texts[max(texts)]}`) and the embedding only {vocab_size} rows; "
            f"tokenizer.json belongs to another model"
        )
    tokens = tuple(texts.get(index, f"[PAD{index}]") for index in range(vocab_size))
    merges = tuple((m.split(" ") if isinstance(m, str) else m) for m in model["merges"])
    special_ids = _special_ids(tokenizer_config, model_config, {text: index for index, text in texts.items()})
    first, last = _template_ends(tokenizer.get("post_processor"))
    if chat_template is None and isinstance(tokenizer_config.get("chat_template"), str):
        chat_template = tokenizer_config["chat_template"]
    return TokenizerFields(
        kind="llama" if has_bytes else "gpt2",
        pre="" if has_bytes else _pre_tokenizer_name(tokenizer),
        tokens=tokens,
        types=tuple(_type_of(index, texts, added, model, has_bytes) for index in range(vocab_size)),
        scores=_scores(tokens, merges) if has_bytes else (),
        merges=() if has_bytes else tuple(" ".join(merge) for merge in merges),
        special_ids=special_ids,
        adds_bos=first is not None and first == special_ids.get("bos"),
        adds_eos=last is not None and last == special_ids.get("eos"),
        adds_space_prefix=has_bytes and _adds_space_prefix(tokenizer),
        chat_template=chat_template,
    )


def _type_of(
    index: int, texts: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any], has_bytes: bool
) -> int:
    if index not in texts:
        return UNUSED
    if has_bytes and texts[index] == model.get("unk_token"):
        return UNKNOWN
    if index in added:
        return CONTROL if added[index].get("special") else USER_DEFINED
    text = texts[index]
    return BYTE if has_bytes and len(text) == 6 and text.startswith("<0x") and text.endswith(">") else NORMAL


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """Minus the place of the first merge that makes each token: the earliest merge scores highest."""
    place: dict[str, int] = {}
    for i, merge in enumerate(merges):
        place.setdefault("".join(merge), i)
    return tuple(-float(place[token]) if token in place else UNREACHABLE_SCORE for token in tokens)


def _pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    stages = _flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    rules: list[str] = []
    for stage in stages:
        if stage["type"] == "ByteLevel" and not stage.get("add_prefix_space"):
            rules += [BYTE_LEVEL_SPLIT] if stage.get("use_regex", True) else []
        elif stage["type"] == "Digits" and stage.get("individual_digits"):
            rules.append(SINGLE_DIGITS)
        elif stage["type"] == "Split" and stage.get("behavior") == "Isolated" and "Regex" in stage["pattern"]:
            rules.append(stage["pattern"]["Regex"])
        else:
            rules.append(f"a {stage['type']} stage")
    normalizers = [stage["type"] for stage in _flatten(tokenizer.get("normalizer"), "normalizers")]
    name = PRE_TOKENIZERS.get((tuple(rules), bool(tokenizer["model"].get("ignore_merges"))))
    if name is None or set(normalizers) - {"NFC"} or not any(stage["type"] == "ByteLevel" for stage in stages):
        raise ValueError(
            f"the tokenizer cuts text in a way that no reader of .gguf files is known to have (normalizers "
            f"{normalizers}, rules {rules}, whole words first: {bool(tokenizer['model'].get('ignore_merges'))}); known "
            f"are {', '.join(sorted(PRE_TOKENIZERS.values()))}; export this model in another format"
        )
    return name


def _adds_space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    normalizers = _flatten(tokenizer.get("normalizer"), "normalizers")
    stages = _flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    return any(stage["type"] == "Prepend" for stage in normalizers) or any(
        stage["type"] == "Metaspace" and stage.get("prepend_scheme", "always") != "never" for stage in stages
    )


def _special_ids(
    tokenizer_config: Mapping[str, Any], model_config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, int]:
    """Ids by the texts in tokenizer_config.json, else as config.json has them (its first, where it lists several)."""
    found: dict[str, int] = {}
    for role in ("bos", "eos", "unk", "pad"):
        text = tokenizer_config.get(f"{role}_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        index = ids.get(text) if text is not None else None
        if index is None:
            index = model_config.get(f"{role}_token_id")
            index = index[0] if isinstance(index, list) and index else index
        if isinstance(index, int):
            found[role] = index
    return found


def _template_ends(post_processor: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Ids of the special tokens put before and after a text, None for none."""
    for stage in _flatten(post_processor, "processors"):
        if stage["type"] == "TemplateProcessing":
            ids = {name: token["ids"][0] for name, token in stage["special_tokens"].items()}
            ends = [stage["single"][0].get("SpecialToken"), stage["single"][-1].get("SpecialToken")]
            first, last = (ids[end["id"]] if end else None for end in ends)
            return first, last
    return None, None


def _flatten(stage: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """The stages of a part of tokenizer.json, which is absent, one stage or a `Sequence` of them."""
    if stage is None:
        return []
    if stage["type"] == "Sequence":
        return [inner for part in stage[parts] for inner in _flatten(part, parts)]
    return [stage]
