"""The hidden states that enter the next layer, as objects of a checkpoint and back.

One tensor per calibration batch, named by its number, in chunks of at most 1 GiB: a damaged chunk is a local damage, and
chunks can be hashed side by side. Masks, positions and rotary tables follow from the tokens and are not stored.
"""

from collections.abc import Sequence

from torch import Tensor

from checkpoint_store.errors import CheckpointDamaged
from checkpoint_store.objects import Payload
from checkpoint_store.tensors import safetensors_payload, tensors_from

CHUNK_BYTES = 1 << 30


def payloads(hidden: Sequence[Tensor]) -> list[Payload]:
    """The hidden states of all batches, in order, cut between batches."""
    chunks: list[dict[str, Tensor]] = [{}]
    size = 0
    for number, tensor in enumerate(hidden):
        if chunks[-1] and size + tensor.nbytes > CHUNK_BYTES:
            chunks.append({})
            size = 0
        chunks[-1][f"{number:08d}"] = tensor
        size += tensor.nbytes
    return [safetensors_payload(chunk) for chunk in chunks if chunk]


def restored(views: Sequence[memoryview], batch_count: int) -> list[Tensor]:
    """The hidden states of `batch_count` batches out of verified chunks, without a copy."""
    found: dict[str, Tensor] = {}
    for view in views:
        found |= tensors_from(view)
    names = [f"{number:08d}" for number in range(batch_count)]
    if sorted(found) != names:
        raise CheckpointDamaged(
            f"the checkpoint's continuation holds hidden states of {len(found)} batches, this job has {batch_count}; "
            f"the identity should have told them apart: run `prefect-quantize verify` on the root"
        )
    return [found[name] for name in names]
