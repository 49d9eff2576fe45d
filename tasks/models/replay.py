"""Proof, before anything is quantized, that our layer-by-layer replay is what transformers computes.

A model cut to one layer of each kind, and to the few vocabulary rows that the check uses, is loaded by transformers'
own loader and run by its own forward. The same tokens go through our embedding, our layers and the staged forward.
Everything that enters and leaves a layer or a linear is compared; the error names the first that differs.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from tasks.models.calls import HEAD, StandIn, map_tensors
from tasks.models.decoder import EXPERTS, Decoder, layer_list
from tasks.models.experts import UnfusedExperts, fused_experts
from tasks.models.families import outside
from tasks.models.staged import StagedForward

VOCABULARY_ROWS = 32
HEAD_INPUT = "input of the head"
TOKENS = 24

Trace = list[tuple[str, Tensor]]  # what was seen and its name, in order of execution


class ReplayError(ValueError):
    """Our replay of the model differs from transformers' own forward; the message names where first."""


def check_replay(decoder: Decoder, device: str | torch.device = "cpu") -> None:
    """Raise ReplayError unless our replay equals transformers' own forward, bit by bit, with and without padding.

    Both run on `device` in its compute dtype. Holds one layer of each kind twice, and a few rows of the vocabulary.
    """
    chosen = decoder.layers_of_each_kind
    reference = _reference(decoder, chosen, decoder.compute_dtype(device)).to(device)
    theirs = {decoder.layer_name(i): reference.get_submodule(decoder.own_layer_name(i)) for i in chosen}
    ours = {decoder.layer_name(i): decoder.materialise(i, device) for i in chosen}
    _compare(_weights(theirs), _weights(ours))
    rows = reference.get_input_embeddings().num_embeddings
    input_ids = torch.randint(0, rows, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    full = torch.ones(2, TOKENS, dtype=torch.bool)
    padded = full.clone()
    padded[1, TOKENS // 2 :] = False
    for attention_mask in (full, padded):
        _refuse_unlike_calls(decoder, attention_mask, device)
        with torch.no_grad(), _recorded(theirs, reference if decoder.quantizes_head else None) as expected:
            reference(input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False)
        with _recorded(ours) as actual:
            hidden_BTH = _replay(decoder, chosen, ours, input_ids, attention_mask, device)
        if decoder.quantizes_head:
            actual.append((HEAD_INPUT, _head_input(decoder, hidden_BTH)))
        _compare(expected, actual)


def _refuse_unlike_calls(decoder: Decoder, attention_mask: Tensor, device: str | torch.device) -> None:
    """ReplayError when the model passes a layer something else than the first of its kind, which stands for it."""
    shape = (*attention_mask.shape, decoder.config.hidden_size)
    hidden_BTH = torch.zeros(shape, dtype=decoder.compute_dtype(device), device=device)
    unlike = decoder.unlike_calls(hidden_BTH, attention_mask.to(device))
    if unlike:
        layer, first = (decoder.layer_name(i) for i in unlike[0])
        raise ReplayError(
            f"transformers' forward calls `{layer}` with other arguments than `{first}`, which is built alike: this model "
            f"can't be quantized layer by layer as it is"
        )


def _reference(decoder: Decoder, chosen: tuple[int, ...], dtype: torch.dtype) -> PreTrainedModel:
    """The cut model, loaded by transformers from the source's tensors, on the CPU."""
    source = decoder.source
    config = copy.deepcopy(decoder.model_config)
    text_config = config.get_text_config()
    rows = min(VOCABULARY_ROWS, text_config.vocab_size)
    text_config.vocab_size, text_config.pad_token_id = rows, None
    tensors = {}
    for name in decoder.outer_tensor_names:
        if source.tensors[name].shape[0] == decoder.config.vocab_size:
            tensors[name] = source.load_rows(name, rows)
        else:
            tensors |= source.load([name])
    for i in chosen:
        tensors |= source.load_stacked(decoder.layer_tensor_names(i))
    with _without_progress_bars():
        model, report = _cut_class(decoder, chosen).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=decoder.attn_implementation,
            experts_implementation=EXPERTS,
            output_loading_info=True,
        )
    wrong = "; ".join(f"{kind}: {', '.join(map(str, names))}" for kind, names in report.items() if names)
    if wrong:
        raise ReplayError(f"transformers does not take the source's tensors as they are ({wrong})")
    return model


def _cut_class(decoder: Decoder, chosen: tuple[int, ...]) -> type[PreTrainedModel]:
    """The model's class, in which the layers that are not chosen only hand on what they are given, and towers that text does
    not pass through are empty, as soon as it is built: before any has weights. So each layer that is chosen is, and is
    called, what it is in the whole model.
    """
    whole = decoder.model_class
    forms = [decoder.form(i) for i in range(decoder.layer_count)]

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        front = self.get_decoder()
        attribute, layers = layer_list(front, decoder.layer_count)
        kept = [layer if i in chosen else StandIn(layer, [], forms[i], False) for i, layer in enumerate(layers)]
        setattr(front, attribute, nn.ModuleList(kept))
        for name in list(outside(self, front)):
            self.set_submodule(name, nn.Module())

    # Its module too: transformers knows by it whose names for the tensors hold.
    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


def _replay(
    decoder: Decoder,
    chosen: tuple[int, ...],
    layers: Mapping[str, nn.Module],
    input_ids: Tensor,
    attention_mask: Tensor,
    device: str | torch.device,
) -> Tensor:
    """Run the layers one after the other as a run does, but for the rounding between them, which the model has not; what
    leaves the last.
    """
    hidden_BTH = decoder.embed(input_ids, decoder.compute_dtype(device), attention_mask).to(device)
    for i in chosen:
        arguments = decoder.call_arguments(i, hidden_BTH, attention_mask)
        with StagedForward(layers[decoder.layer_name(i)], decoder.subsets(i), [(hidden_BTH, arguments)]) as staged:
            for subset in decoder.subsets(i):
                for _ in staged.advance(subset):
                    pass
            (hidden_BTH,) = staged.finish()
    return hidden_BTH


def _head_input(decoder: Decoder, hidden_BTH: Tensor) -> Tensor:
    i = decoder.layer_count
    head = decoder.materialise(i, hidden_BTH.device)
    with StagedForward(head, ((HEAD,),), [(hidden_BTH, decoder.call_arguments(i, hidden_BTH, None))]) as staged:
        ((_, input_BTH),) = staged.advance((HEAD,))
    return input_BTH


def _weights(layers: Mapping[str, nn.Module]) -> Trace:
    """The layers' weights as transformers holds them: experts fused."""
    trace = []
    for layer_name, layer in layers.items():
        tensors = layer.state_dict()
        for path, module in layer.named_modules():
            if isinstance(module, UnfusedExperts):
                tensors = {name: tensors[name] for name in tensors if not name.startswith(f"{path}.")}
                tensors |= {f"{path}.{name}": tensor for name, tensor in module.fused_tensors().items()}
        trace += [(f"weight `{layer_name}.{name}`", tensors[name]) for name in sorted(tensors)]
    return trace


@contextmanager
def _recorded(layers: Mapping[str, nn.Module], with_head: PreTrainedModel | None = None) -> Iterator[Trace]:
    """Record what enters and leaves the layers and their experts, and what enters their other linears, while this is open.

    And what enters the head of a whole model.
    """
    trace: Trace = []

    def record(name: str, value: Any) -> None:
        map_tensors(value, lambda tensor: trace.append((name, tensor)))

    def on_entry(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record(f"input of `{name}`", args)
            for key in sorted(kwargs):
                record(f"`{key}` given to `{name}`", kwargs[key])

        return hook

    def on_exit(name: str) -> Any:
        return lambda _module, _args, output: record(f"output of `{name}`", output)

    handles = []
    for layer_name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(on_entry(layer_name), with_kwargs=True))
        handles.append(layer.register_forward_hook(on_exit(layer_name)))
        experts = {name for name, module in layer.named_modules() if isinstance(module, UnfusedExperts)}
        experts |= {name for name, _ in fused_experts(layer)}
        for name, module in layer.named_modules():
            full = f"{layer_name}.{name}"
            is_inside = any(name.startswith(f"{path}.") for path in experts)
            if name in experts or (isinstance(module, nn.Linear) and not is_inside):
                handles.append(module.register_forward_pre_hook(on_entry(full), with_kwargs=True))
            if name in experts:
                handles.append(module.register_forward_hook(on_exit(full)))
    if with_head is not None:
        head = with_head.get_output_embeddings()
        handles.append(head.register_forward_pre_hook(lambda _, args: record(HEAD_INPUT, args)))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _compare(expected: Trace, actual: Trace) -> None:
    for (name, theirs), (our_name, ours) in zip(expected, actual, strict=False):
        if name != our_name:
            raise ReplayError(f"transformers' forward comes to the {name} where our replay comes to the {our_name}")
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            raise ReplayError(
                f"{name} is {theirs.dtype} {list(theirs.shape)} in transformers' own forward, "
                f"{ours.dtype} {list(ours.shape)} in our replay of one layer at a time"
            )
        if not torch.equal(theirs, ours):
            if bool(theirs.isnan().any()):  # which equals nothing, itself neither
                raise ReplayError(
                    f"{name} holds NaN in transformers' own forward: the source's weights are damaged or overflow "
                    f"{theirs.dtype}; fetch it again, or use another source"
                )
            difference = (theirs.double() - ours.double()).abs().max().item()
            raise ReplayError(
                f"{name} differs between transformers' own forward and our replay of one layer at a time "
                f"(by up to {difference:.3g}): this model can't be quantized layer by layer as it is"
            )
    if len(expected) != len(actual):
        raise ReplayError(f"transformers' forward has {len(expected)} steps, our replay {len(actual)}")
