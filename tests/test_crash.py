"""Nothing that was acknowledged is lost, whatever a crash leaves of the disk, at any point, in any of the legal ways.

Invariants, in every state: acknowledged generations are found and intact; each listed generation is whole; a reader and a writer find
the same and the reader changes nothing; the next generation can be published and loaded, exact to the byte; before the first
acknowledgement the root is empty or valid; without CURRENT the spare pointer leads to the same generation or the one before.
`pytest -s` prints how many distinct states were checked.
"""

import pytest
from crash_explorer import Explorer
from crash_histories import (
    FAULTS,
    Root,
    after_damage,
    after_failures,
    after_kills,
    after_power_failures,
    in_one_session,
    in_one_session_that_dissolves,
    in_one_session_with_scratch,
    in_use,
    in_use_without_pages,
    new_root,
    publishing,
)
from recording_disk import RecordingDisk
from saved_contents import small_pages

ROOTS = pytest.mark.parametrize("root", [new_root, in_use], ids=["new root", "root in use"])


@pytest.fixture(autouse=True)
def pages_of_two_names():
    """Else no history that can be explored would fill one."""
    with small_pages(2):
        yield


def report(explorer: Explorer, history: str) -> None:
    print(f"\n{history}: {len(explorer.found)} states, {explorer.sampled_points} of {explorer.points} points sampled")
    assert explorer.sampled_points == 0


def test_a_crash_at_any_point_of_six_generations_loses_none_that_was_acknowledged():
    explorer = Explorer()
    disk, progress = in_one_session(explorer, generations=6)
    assert progress.acknowledged == 6
    swept = [operation.path for operation in disk.operations if operation.name == "unlink"]
    assert any(path.startswith("objects/") for path in swept) and any(path.startswith("generations/") for path in swept)
    assert pages_left(disk) == 5
    report(explorer, "six generations in one session")


def pages_left(disk: RecordingDisk) -> int:
    return sum((content or b"").startswith(b'{"objects":') for _, _, content in disk.machine.visible_state())


@pytest.mark.parametrize("step", [1, -1], ids=["same pages", "other pages"])
def test_a_crash_at_any_point_where_pages_are_dissolved_and_made_anew_loses_nothing(step: int):
    explorer = Explorer(with_records=False)
    disk = in_one_session_that_dissolves(explorer, step)
    assert pages_left(disk) == 3
    report(explorer, "four generations, pages dissolved in the second")


def test_a_crash_while_a_root_without_pages_gets_its_first_loses_nothing():
    explorer = Explorer(with_records=False)
    machine, progress = in_use_without_pages()
    disk = explorer.explore(machine, publishing(2, with_records=False), progress)
    assert pages_left(disk) == 2
    report(explorer, "two generations on a root without pages")


@ROOTS
def test_a_session_after_one_that_was_killed_anywhere_loses_nothing(root: Root):
    explorer = Explorer(with_records=False)
    kills = after_kills(explorer, root)
    assert kills > 50
    report(explorer, f"two generations after a kill at each of {kills} operations")


@ROOTS
def test_a_session_after_a_power_failure_anywhere_loses_nothing(root: Root):
    explorer = Explorer(with_records=False)
    states = after_power_failures(explorer, root)
    assert states > 50
    report(explorer, f"one generation after each of {states} states of a power failure")


@pytest.mark.parametrize("fault", FAULTS)
@ROOTS
def test_a_failing_operation_followed_by_a_crash_anywhere_loses_nothing(root: Root, fault: str):
    explorer = Explorer(with_records=False, is_faulty=True)
    failures, named = after_failures(explorer, root, FAULTS[fault])
    assert named > failures // 3
    report(explorer, f"{fault} at each of {failures} operations ({named} ended in a named error), then a resume")


@pytest.mark.parametrize("path", ["CURRENT", "generations/", "page"])
def test_a_crash_after_the_newest_was_found_damaged_keeps_the_older_one_that_was_gone_on_from(path: str):
    explorer = Explorer(with_records=False, is_damaged=True)
    after_damage(explorer, path)
    report(explorer, f"four generations after damage to {path}")


def test_what_a_crash_leaves_in_scratch_makes_no_difference():
    """The other tests list scratch as all there or all gone; here it is branched on like everything else."""
    explorer = Explorer(with_records=False)
    assert in_one_session_with_scratch(explorer).acknowledged == 5
    report(explorer, "one generation, scratch included")
