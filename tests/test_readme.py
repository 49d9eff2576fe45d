"""The README does what it says: its commands run as they stand, in order, on a model that is small."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from flows import cli
from tests.tiny_models import TEXTS, write_tiny_llama

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def block(name: str) -> str:
    """The code block that follows the line `<!-- name -->`."""
    found = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert found, f"no block is marked `{name}`"
    return found[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_llama(tmp_path / "my-model")
    (tmp_path / "calibration.txt").write_text("\n".join(TEXTS * 20))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_run_as_they_stand(place: Path, prefect_server: None, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (block("test: run") + block("test: operate")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "prefect-quantize"
        assert cli.main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
    assert (place / "my-model-4bit" / "config.json").is_file()


def test_each_method_runs_with_its_command(
    place: Path, prefect_server: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (block("test: methods") + block("test: rules")).splitlines():
        arguments = shlex.split(line)[1:]
        assert cli.main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
        assert (place / arguments[arguments.index("--output") + 1] / "quantization_report.json").is_file()


def test_the_python_example_makes_the_same_model(place: Path, prefect_server: None) -> None:
    names: dict[str, object] = {}
    exec(block("test: python"), names)
    assert (place / "my-model-4bit" / "quantization_report.json").is_file()
    shutil.rmtree(place / "checkpoints")


def test_every_command_of_the_readme_is_in_a_block_that_is_run_or_is_one_of_the_named_ones() -> None:
    run = block("test: run") + block("test: operate")
    elsewhere = {"demo", "run", "doctor", "deploy", "serve"}  # in prose: test_demo.py, test_cli.py, test_deployments.py
    for command in re.findall(r"prefect-quantize\s+([a-z-]+)", README):
        assert command in elsewhere or f"prefect-quantize {command}" in run


def test_the_options_of_the_table_exist() -> None:
    table = README.split("## The options that matter")[1].split("## Verify")[0]
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    parser_options = {option for action in _run_actions() for option in action.option_strings}
    mentioned = set(re.findall(r"`(--[a-z-]+)`", table))
    assert mentioned
    assert mentioned <= parser_options


def _run_actions() -> list:  # type: ignore[type-arg]
    commands = next(action for action in cli._parser()._actions if action.choices)
    return commands.choices["run"]._actions  # type: ignore[index, call-overload, union-attr]
