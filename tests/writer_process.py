"""A real writer, as a process that tests stop, kill and starve: `python tests/writer_process.py`.

It imports the store once and then, for each line `ROOT PROGRESS GENERATIONS FILE_SIZE_LIMIT` on its input, forks a child that stops
itself, and when it is continued opens ROOT and publishes GENERATIONS more generations, with pages of two names. The child leaves the cursor that it
publishes next, and the last one acknowledged, in the first two bytes of the file PROGRESS, through a mapping, so that telling
them is no system call. The parent writes the child's process id, and when it has ended how: `killed N`, or its exit status (0 done, 3 a
named error, 4 anything else).
"""

import mmap
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from saved_contents import load, open_writer, save, small_pages

from checkpoint_store.disk import Disk
from checkpoint_store.errors import CheckpointError


def publish(root: str, progress: mmap.mmap, generations: int) -> None:
    with small_pages(2):
        _publish(root, progress, generations)


def _publish(root: str, progress: mmap.mmap, generations: int) -> None:
    store = open_writer(Disk(), root)
    cursor, _ = load(store)
    for following in range(cursor + 1, cursor + generations + 1):
        progress[0] = following
        save(store, following)
        progress[1] = following
    store.close()


def child(root: str, progress: str, generations: str, file_size_limit: str) -> int:
    with Path(progress).open("r+b") as file:
        told = mmap.mmap(file.fileno(), 2)
    os.kill(os.getpid(), signal.SIGSTOP)
    if int(file_size_limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_size_limit), int(file_size_limit)))
    try:
        publish(root, told, int(generations))
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    except BaseException:
        traceback.print_exc()
        return 4
    return 0


def main() -> None:
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os._exit(child(*line.split()))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        ended = f"killed {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))
        print(ended, flush=True)


if __name__ == "__main__":
    main()
