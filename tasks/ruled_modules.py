"""What rules for modules come to on a model: what can't be, and how an export tells its readers.

vLLM and SGLang fuse matrices that share an input, and the experts of a layer, into one with one scheme, so rules must
treat them alike. These programs look for a rule by the fused name, which is in no file (older versions only by it): where
the rules say something else of that name than of its parts, the export has a rule for it, before all others.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.formats import compressed_tensors, gptq
from tasks.models.decoder import Decoder
from tasks.module_rules import LEAVE, ModuleConfigs, SkipRule, first, without_effect
from tasks.quantization import AWQConfig, BitsAndBytesConfig, FP8Config, GPTQConfig, Quantization, RTNConfig

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
EXPERT = re.compile(r"(.+\.experts)\.\d+\.[^.]+")
EXPERT_NUMBER = re.compile(r"(?<=experts\\\.)\d+(?=\\\.)")
VLLM_LAYERS = "language_model.model.layers."  # of the text model in whatever wraps one
TOLD = 3  # modules named in a message

Ruled = GPTQConfig | RTNConfig | AWQConfig | FP8Config | BitsAndBytesConfig


def problems(config: Quantization, decoder: Decoder) -> Iterator[str]:
    """Why these rules can't be used on this model, one sentence each."""
    if not isinstance(config, Ruled) or not config.dynamic:
        return
    modules = [module for _, module in _modules(decoder)]
    deciding = first(config.dynamic, decoder.head_name)
    # A head that is not quantized anyway may be left out by name, as rules written for other quantizers do.
    head = [decoder.head_name] if deciding is not None and deciding.skips and not decoder.quantizes_head else []
    yield from without_effect(config.dynamic, [*modules, *head], "linear in a layer")
    configs = ModuleConfigs(config)
    if all(configs.of(module) is None for module in modules):
        yield "rules leave every module as it is; leave out one of them"
    conflicts: dict[tuple[str, ...], list[str]] = {}
    for unit, members in _fused_units(modules).items():
        views = {member: _view(configs.of(member)) for member in members}
        if len(set(views.values())) > 1:
            short = {member.removeprefix(unit.rpartition(".")[0] + "."): view for member, view in views.items()}
            one = {view: name for name, view in reversed(short.items())}
            told = tuple(f"`{name}` {view}" for view, name in reversed(one.items()))
            conflicts.setdefault(told, []).append(unit)
    for told, units in conflicts.items():
        more = f" and {len(units) - TOLD} more" if len(units) > TOLD else ""
        yield (
            f"rules make modules differ that loaders such as vLLM fuse into one, {', '.join(units[:TOLD])}{more}: "
            f"{', '.join(told)}; give them one rule"
        )


def notes(config: Quantization, decoder: Decoder) -> Iterator[str]:
    """What a reader of an export with rules should know beforehand."""
    if decoder.quantizes_head:
        yield "transformers does not load a quantized head, and makes up another without an error; GPTQModel and vLLM do"
    if not isinstance(config, GPTQConfig | RTNConfig) or not config.dynamic:
        return
    configs = ModuleConfigs(config)
    found = [own for _, module in _modules(decoder) if (own := configs.of(module)) is not None]
    if len({_view(own) for own in found}) > 1:
        if config.checkpoint_format == "compressed-tensors" and not all(own.sym for own in found):
            yield "transformers loads no compressed-tensors file of several schemes with zero points among them; vLLM does"
        if config.checkpoint_format in gptq.FORMATS:
            yield (
                "transformers takes one width and group size for all modules of a gptq file, and refuses this one; "
                "GPTQModel and vLLM read the rules"
            )


def tell(described: dict[str, Any], config: Quantization, decoder: Decoder) -> dict[str, Any]:
    """`quantization_config` with what the rules have come to, in the words of the layout's readers.

    Modules that are left as they are, where the layout has a list for them, are told by `Scheme.leave_out`.
    """
    if isinstance(config, GPTQConfig | RTNConfig) and config.checkpoint_format in gptq.FORMATS:
        told = _gptq(described, config, decoder) if config.dynamic else described
        return told | ({"dynamic": _towers(decoder) | told.get("dynamic", {})} if decoder.towers else {})
    if not isinstance(config, GPTQConfig | RTNConfig | AWQConfig) or not config.dynamic:
        return described
    if config.checkpoint_format == "compressed-tensors":
        return _compressed_tensors(described, config, decoder)
    return described


def of_module(described: Mapping[str, Any], module: str) -> dict[str, Any]:
    """What a `quantization_config` with rules says of one module, as one without them says it of all."""
    narrowed = dict(described)
    for pattern, settings in (described.get("dynamic") or {}).items():
        if SkipRule(pattern=LEAVE + pattern.removeprefix("+:").removeprefix(LEAVE)).matches(module):
            narrowed |= settings
            break
    if len(groups := described.get("config_groups") or {}) > 1:
        narrowed["config_groups"] = {
            name: group
            for name, group in groups.items()
            if any(re.match(target.removeprefix("re:"), module) for target in group["targets"])
        }
    return narrowed


def _gptq(described: dict[str, Any], config: GPTQConfig | RTNConfig, decoder: Decoder) -> dict[str, Any]:
    configs, modules = ModuleConfigs(config), [module for _, module in _modules(decoder)]
    found = {module: configs.of(module) for module in modules}
    fused: dict[tuple[str, str], list[str]] = {}
    for unit, members in _fused_units(modules).items():
        wanted = found[members[0]]
        if _view(configs.of(unit)) != _view(wanted):
            settings = None if wanted is None else _settings(wanted)
            fused.setdefault((_within_layer(unit, decoder), json.dumps(settings)), []).append(unit)
    dynamic: dict[str, Any] = {}
    for (name, text), units in fused.items():
        settings = json.loads(text)
        dynamic[("" if settings else LEAVE) + f"{_pattern(name, units, decoder)}$"] = settings or {}
    for rule in config.dynamic:
        settings = rule.overrides()
        if settings.keys() & {"desc_act", "static_groups"}:
            # What a reader must do: static groups leave `g_idx` in its natural order.
            settings["desc_act"] = next(
                _settings(found[m])["desc_act"] for m in modules if first(config.dynamic, m) == rule
            )
        dynamic[rule.pattern] = settings
        if pattern := _by_other_names(rule, config, modules, decoder):
            dynamic[("" if settings else LEAVE) + pattern] = settings
    told = described | {"dynamic": dynamic}
    if config.checkpoint_format == "gptq" and any(c is not None and not c.sym for c in found.values()):
        quantizer = list(dict.fromkeys([*described["meta"]["quantizer"], gptq.ASYMMETRIC_V1_MARK]))
        told["meta"] = described["meta"] | {"quantizer": quantizer}
    quantized = [module for module, own in found.items() if own is not None]
    # transformers knows no rules, but this list; it holds no packed experts, and vLLM would take theirs for unquantized.
    # Nor does it load a quantized head.
    if len(quantized) < len(modules) and not (decoder.has_experts or decoder.quantizes_head):
        within = [set(decoder.linear_shapes(i)) for i in range(decoder.layer_count)]
        are_alike = all(names == within[0] for names in within)
        by_own = [decoder.own_name(module) for module in quantized]
        told["modules_in_block_to_quantize"] = [list(decoder.linear_shapes(0)) if are_alike else by_own]
    return told


def _towers(decoder: Decoder) -> dict[str, Any]:
    """A rule that leaves what a wrapper has beside its text model, whatever a reader calls the place of it."""
    names = dict.fromkeys(tower.rpartition(".")[2] for tower in decoder.towers)
    return {rf"{LEAVE}(?:.+\.)?(?:{'|'.join(map(re.escape, names))})(?:\.|$)": {}}


def _by_other_names(rule: SkipRule, config: GPTQConfig | RTNConfig, modules: list[str], decoder: Decoder) -> str | None:
    """An expression for the modules a rule decides about, where it does not match all names that readers have for them."""
    within: dict[str, list[str]] = {}
    is_enough = True
    for module in modules:
        if first(config.dynamic, module) != rule:
            continue
        within.setdefault("" if module == decoder.head_name else _within_layer(module, decoder), []).append(module)
        prefix = _layers_prefix(decoder)
        others = [other + module.removeprefix(prefix) for other in _prefixes(decoder) if module.startswith(prefix)]
        is_enough &= all(rule.matches(other) for other in others or [decoder.own_name(module)])
    if is_enough:
        return None
    head = f"(?:{'|'.join(map(re.escape, dict.fromkeys((decoder.own_name(decoder.head_name), decoder.head_name))))})"
    return f"(?:{'|'.join(_pattern(name, full, decoder) if name else head for name, full in within.items())})$"


def _compressed_tensors(
    described: dict[str, Any], config: GPTQConfig | RTNConfig | AWQConfig, decoder: Decoder
) -> dict[str, Any]:
    """A group for each scheme.

    With more than one, each names its modules: `Linear` would win over fused names in vLLM. Nor does the file ask to be
    dequantized, by which transformers 5.24.0 would take one of the schemes for all.
    """
    configs = ModuleConfigs(config)
    named: dict[str, dict[str, list[str]]] = {}
    dequantized = False
    told = {key: value for key, value in described.items() if key != "dequantize"}
    for _, module in _modules(decoder):
        own = configs.of(module)
        if own is None:
            continue
        alone = compressed_tensors.quantization_config(own)
        dequantized = "dequantize" in alone
        (group,) = alone["config_groups"].values()
        within = _within_layer(module, decoder)
        named.setdefault(json.dumps(group), {}).setdefault(_any_expert(within), []).append(module)
    groups = {}
    for number, (text, modules) in enumerate(named.items()):
        targets = [f"re:{_pattern(within, full, decoder)}$" for within, full in modules.items()]
        groups[f"group_{number}"] = json.loads(text) | ({"targets": targets} if len(named) > 1 else {})
    return told | {"config_groups": groups} | ({"dequantize": True} if dequantized and len(groups) == 1 else {})


def _modules(decoder: Decoder) -> Iterator[tuple[int, str]]:
    """The full names of all linears in layers, quantized or not, with their layers; and the head."""
    for i in range(decoder.layer_count):
        for subset in decoder.linears_by_input(i):
            for name in subset:
                yield i, f"{decoder.layer_name(i)}.{name}"
    if decoder.quantizes_head:
        yield decoder.layer_count, decoder.head_name


def _fused_units(modules: Iterable[str]) -> dict[str, list[str]]:
    """Full names of what loaders fuse, with the modules that it is made of."""
    units: dict[str, list[str]] = {}
    for module in modules:
        if (match := EXPERT.fullmatch(module)) is not None:
            units.setdefault(match[1], []).append(module)
            continue
        prefix, _, name = module.rpartition(".")
        for fused, parts in FUSED.items():
            if name in parts:
                units.setdefault(f"{prefix}.{fused}", []).append(module)
    return {unit: members for unit, members in units.items() if len(members) > 1}


def _view(config: Any) -> str:
    """What loaders see of a module's config."""
    if config is None:
        return "is left as it is"
    if not isinstance(config, GPTQConfig | RTNConfig):
        return "is quantized"
    seen = _settings(config)
    order = ", in act-order" if seen["desc_act"] else ""
    grid = "symmetric" if seen["sym"] else "asymmetric"
    return f"has {seen['bits']} bits, group_size {seen['group_size']}, {grid}{order}"


def _settings(config: GPTQConfig | RTNConfig) -> dict[str, Any]:
    in_order = isinstance(config, GPTQConfig) and config.desc_act and not config.static_groups
    return {"bits": config.bits, "group_size": config.group_size, "sym": config.sym, "desc_act": in_order}


def _within_layer(full: str, decoder: Decoder) -> str:
    """A name less its layer's: what follows `model.layers.3.`."""
    return full.removeprefix(_layers_prefix(decoder)).partition(".")[2]


def _layers_prefix(decoder: Decoder) -> str:
    return decoder.layer_name(0).removesuffix("0")


def _prefixes(decoder: Decoder) -> list[str]:
    """What readers have before a layer's number: the files' name, that of transformers' modules, and in wrappers vLLM's."""
    own = decoder.own_layer_name(0).removesuffix("0")
    return list(dict.fromkeys([_layers_prefix(decoder), own, *([VLLM_LAYERS] if decoder.towers else [])]))


def _any_expert(within: str) -> str:
    """One name for all experts' projections of a name, in which their number is that of the first."""
    return re.sub(r"(?<=experts\.)\d+(?=\.)", "0", within)


def _pattern(within: str, full: list[str], decoder: Decoder) -> str:
    """An expression for these full names, all of one name within their layers but for the number of an expert."""
    prefix = _layers_prefix(decoder)
    layers = list(dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in full))
    numbers = r"\d+" if len(layers) == decoder.layer_count else f"({'|'.join(layers)})"
    name = EXPERT_NUMBER.sub(lambda _: r"\d+", re.escape(within))
    before = [re.escape(one) for one in _prefixes(decoder)]
    return rf"{before[0] if len(before) == 1 else '(?:' + '|'.join(before) + ')'}{numbers}\.{name}"
