"""One decoder layer: quantized across its share of the pool, checked, staged; what Prefect keeps of it is a receipt.

The task's record in the checkpoint is what makes a finished layer show as Cached on a resume. Prefect treats a record
that it cannot read as one that is not there, and would run the layer again: the first line of the task refuses that.
"""

import gc
import traceback
from contextlib import suppress
from typing import Any

import torch
from prefect import task, unmapped
from prefect.context import TaskRunContext
from prefect.futures import PrefectFutureList, as_completed
from prefect.states import State
from torch import Tensor

from checkpoint_store import session
from checkpoint_store.objects import ObjectRef
from checkpoint_store.tensors import safetensors_payload
from tasks import running
from tasks.layer_work import LayerWork, SiblingFailed
from tasks.quantize_shard import quantize_shard
from tasks.report import LayerReceipt, ModuleReport

TASK_RETRIES = 2
# A shard that hangs in a driver would hang the run for ever; a layer of the largest models takes an hour.
SHARD_TIMEOUT_SECONDS = 24 * 3600


def cache_key(identity_digest: str, layer: int) -> str:
    """Name of a layer's result record: the job, less the physical devices, and the layer."""
    return f"layer-{layer:05d}-{identity_digest}"


def _cache_key_fn(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    return parameters["key"]


def is_device_error(task: Any, task_run: Any, state: State) -> bool:
    """Whether a failed layer may succeed when it is repeated: memory or a device was lost, nothing was wrong."""
    try:
        state.result(raise_on_failure=True)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        _free_memory(error)
        return True
    except Exception:
        return False
    return False


def _free_memory(error: BaseException) -> None:
    """Let go of what the failed attempt holds, on every device, before the layer is repeated."""
    # The frames that failed, of this error and of those that it was raised from, still hold what filled the device.
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__cause__ or failed.__context__
    gc.collect()  # tensors in cycles of an exception and its frames
    if torch.cuda.is_available():
        # A lost device answers with its own error again, and has no memory to give back.
        with suppress(torch.AcceleratorError):
            torch.cuda.empty_cache()


@task(
    name="quantize-layer",
    task_run_name="{model} {method} {name}",
    cache_key_fn=_cache_key_fn,
    persist_result=True,
    result_serializer="json",
    cache_result_in_memory=False,
    retries=TASK_RETRIES,
    retry_condition_fn=is_device_error,
)
def quantize_layer(model: str, method: str, name: str, layer: int, key: str) -> dict[str, Any]:
    """Quantize one decoder layer and stage it in the checkpoint; the receipt of what was staged, as plain JSON."""
    session.current().refuse_if_pinned(key)
    run = running.current()
    with run.share_of_pool(layer) as devices:
        run.begin_layer(layer)
        work = run.works[layer] = LayerWork(run, layer, devices)
        try:
            _run_shards(work, layer)
        except torch.AcceleratorError:
            _leave_out_lost(run, work)
            raise
        finally:
            del run.works[layer]
    packed = pack(run, work)
    scan(packed, name)
    ref = session.current().stage_layer(name, safetensors_payload(packed))
    adapter = _stage_adapter(work, name, run.decoder.own_layer_name(layer))
    running.return_freed_memory()
    if run.needs_activations and not run.decoder.is_head(layer):
        run.replace_hidden([work.outputs[batch] for batch in range(len(run.hidden))])
    return _receipt(run, work, key, ref, adapter).model_dump(mode="json")


def _run_shards(work: LayerWork, layer: int) -> None:
    """Start all shards and wait for them; the first real error of any of them, not the broken barrier of its siblings."""
    try:
        shards: PrefectFutureList[int] = quantize_shard.map(unmapped(layer), work.slots)
        for shard in as_completed(list(shards), timeout=SHARD_TIMEOUT_SECONDS):
            shard.wait()  # it is done; this takes its state from the thread, where `state` alone asks the API
            if not shard.state.is_completed():
                work.abort()  # also when it failed before its first line, where it could not break the barrier itself
        if work.error is not None:
            raise work.error
        told_by_siblings = None
        for shard in shards:
            try:
                shard.result(timeout=SHARD_TIMEOUT_SECONDS)
            except SiblingFailed as error:
                told_by_siblings = error
        if told_by_siblings is not None:
            raise told_by_siblings
    finally:
        work.abort()  # a run that is given up here, or while shards are started, leaves none at work


def _leave_out_lost(run: running.Run, work: LayerWork) -> None:
    """Let the other devices of the pool take the work of the one that failed, when there are others."""
    slot = work.failed_slot
    if slot is not None and run.leave_out(slot):
        run.logger.warning(
            "device %d of the pool (%s) is lost and left out: %d of %d go on with layer %d; the next process tries it again",
            slot, work.devices[slot], len(run.devices), len(run.pool.devices), work.layer + 1,
        )  # fmt: skip


def pack(run: running.Run, work: LayerWork) -> dict[str, Tensor]:
    """The layer's tensors under their final names: packed linears, everything else as the source has it or as folded."""
    quantized = {run.decoder.full_name(work.layer, module): rows for module, rows in work.quantized.items()}
    carried = [
        tensor for tensor in run.decoder.layer_tensor_names(work.layer) if tensor.rpartition(".")[0] not in quantized
    ]
    changed = {name: tensor for name, tensor in work.folded.items() if name in carried}
    packed = run.scheme.carry(run.source.load(carried) | changed)
    for full, rows in quantized.items():
        bias = work.folded.get(f"{full}.bias")
        if bias is None and f"{full}.bias" in run.source.tensors:
            bias = run.source.load([f"{full}.bias"])[f"{full}.bias"]
        packed |= run.scheme.of(full).pack(full, rows, bias)
    return run.scheme.written(run.decoder, packed)


def scan(tensors: dict[str, Tensor], layer_name: str) -> None:
    """ValueError that names the first tensor with a NaN or an infinity in it."""
    for name, tensor in tensors.items():
        # Eight-bit floats can't be asked themselves.
        finite = (tensor.float() if tensor.itemsize == 1 else tensor).isfinite() if tensor.is_floating_point() else None
        if finite is not None and not bool(finite.all()):
            count = int((~finite).sum())
            raise ValueError(
                f"`{name}` of layer `{layer_name}` holds {count} values that are not finite: the source's weights are "
                f"broken there, or too large for the layout's half precision; nothing of this layer was stored"
            )


def _stage_adapter(work: LayerWork, name: str, own_name: str) -> str | None:
    """Stage the object of the layer's adapter, which peft looks for by `own_name`, transformers' name of the layer.

    Its digest, or None where none is made.
    """
    if work.adapter is None:
        return None
    tensors = work.adapter.tensors(own_name)
    scan(tensors, name)
    return session.current().stage_layer(name, safetensors_payload(tensors), session.ADAPTER).sha256


def _receipt(run: running.Run, work: LayerWork, key: str, ref: ObjectRef, adapter: str | None) -> LayerReceipt:
    modules = []
    compensated = work.adapter.modules if work.adapter is not None else {}
    for subset in run.decoder.subsets(work.layer):  # not in the order in which the pool was done
        outcome = work.outcomes[subset]
        for module in subset:
            modules.append(
                ModuleReport(
                    name=module, method=outcome.method, loss=work.quantized[module].loss, tokens=outcome.tokens,
                    damp_percent=outcome.damp_percent,
                    # A module may fall back on its own where siblings do not have to.
                    fallback=getattr(work.quantized[module], "fallback", None) or outcome.fallback,
                    unscaled=outcome.unscaled,
                    adapter_loss=compensated[module].loss if module in compensated else None,
                )
            )  # fmt: skip
    loss = sum(module.loss for module in modules) / len(modules) if modules else 0.0
    return LayerReceipt(
        index=work.layer, name=run.decoder.layer_name(work.layer), key=key, sha256=ref.sha256, size=ref.size, loss=loss,
        adapter_sha256=adapter,
        tokens=max((module.tokens for module in modules), default=0), seconds=round(run.end_layer(work.layer), 3),
        modules=tuple(modules), expert_tokens=tuple(
            work.outcomes[before].tokens for before, _ in run.decoder.experts(work.layer) if run.needs_activations
        ),
    )  # fmt: skip
