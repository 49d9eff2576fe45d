"""What can go wrong with a checkpoint, as one tree; every message says what, which thing, why, and how to mend it.

CheckpointError
├── StoreLocked         another writer holds the root
├── CheckpointMissing   a checkpoint is required and none is published
├── CheckpointExists    a fresh run was asked for and a checkpoint is published
├── IdentityMismatch    the checkpoint belongs to another job
├── CheckpointDamaged   published bytes are missing or wrong, and nothing older is whole
├── CheckpointStopped   not a failure: a stop was asked for and the progress is published
├── StorageFull         no space or quota left
└── UnknownFormat       written by a newer version of this format
"""


class CheckpointError(Exception):
    """Base of everything the store raises on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class StoreLocked(CheckpointError):
    exit_code = 77


class CheckpointMissing(CheckpointError):
    exit_code = 80


class CheckpointExists(CheckpointError):
    exit_code = 81


class IdentityMismatch(CheckpointError):
    exit_code = 76


class CheckpointDamaged(CheckpointError):
    exit_code = 78


class CheckpointStopped(CheckpointError):
    exit_code = 75


class StorageFull(CheckpointError):
    exit_code = 79


class UnknownFormat(CheckpointError):
    exit_code = 82
