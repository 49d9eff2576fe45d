"""Verify and sweep a checkpoint root as a flow, for schedules: damage is found while an older generation is still whole."""

from typing import Any

from prefect import flow, get_run_logger

from checkpoint_store import maintenance
from checkpoint_store.errors import CheckpointDamaged, StoreLocked
from checkpoint_store.garbage import SweepReport


@flow(name="maintain-store", flow_run_name="{root}", persist_result=False)
def maintain_store(
    root: str,
    megabytes_per_second: float | None = None,
    quarantine: bool = False,
    allow_network_filesystem: bool = False,
) -> dict[str, Any]:
    """Hash everything that is published, then remove what no generation needs; CheckpointDamaged when a byte is wrong.

    Nothing is swept from a damaged root. A sweep that meets a reader, or a run at work, is left for the next time.

    Args:
        root: The checkpoint root.
        megabytes_per_second: At most so much is read, so that a run beside it keeps the disk; unlimited when left out.
        quarantine: Set damaged objects aside instead of only naming them.
        allow_network_filesystem: Accept a root on NFS, SMB, Lustre or FUSE.
    """
    logger = get_run_logger()
    rate = None if megabytes_per_second is None else megabytes_per_second * 1e6
    found = maintenance.verify(
        root, bytes_per_second=rate, quarantine=quarantine, allow_network_filesystem=allow_network_filesystem
    )
    logger.info("%s: %d objects, %.1f MB hashed", root, found.objects, found.bytes / 1e6)
    if not found.is_whole:
        raise CheckpointDamaged(
            f"`{root}` is damaged: {'; '.join(found.problems)}. A run falls back to an older generation that is whole; "
            f"see `prefect-quantize verify {root}`, and look after the disk"
        )
    try:
        swept = maintenance.sweep(root, allow_network_filesystem=allow_network_filesystem)
    except StoreLocked as error:  # a run sweeps by itself, each time it publishes
        swept = SweepReport(deferred=f"nothing was swept: {error}")
    logger.info("%s: %s", root, swept.deferred or f"{swept.objects} objects, {swept.bytes / 1e6:.1f} MB removed")
    return {"verified": found.as_json(), "swept": swept.as_json()}
