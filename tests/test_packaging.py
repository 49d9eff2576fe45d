"""What is installed is what is here: every package listed, every pin in step, importable from anywhere, free of network."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("flows", "tasks", "checkpoint_store", "deployments")
DATA_FILES = {
    "checkpoint_store/FORMAT.md",
    "deployments/prefect.yaml",
    "flows/demo_calibration.txt",
    "flows/demo_held_out.txt",
}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_package_and_data_file_is_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves a directory behind, from which the next one would take stale files
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert inside >= modules | DATA_FILES
    assert {name.split("/")[0] for name in inside if ".dist-info/" not in name} == set(PACKAGES)


def test_every_dependency_is_pinned_in_the_range_that_is_declared() -> None:
    declared = PROJECT["project"]["dependencies"] + [
        requirement for extra in PROJECT["project"]["optional-dependencies"].values() for requirement in extra
    ]
    own = PROJECT["project"]["name"]
    pins = constraints()
    for requirement in map(Requirement, declared):
        if requirement.name == own:  # its extras, by name
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_constraints_cover_everything_that_our_dependencies_bring() -> None:
    installed = {canonicalize_name(found.metadata["Name"]): found for found in distributions()}
    wanted = [canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]]
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in seen or name not in installed:
            continue
        seen.add(name)
        for text in installed[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(canonicalize_name(requirement.name))
    # What a CUDA build of torch brings is not there with a CPU build; setuptools comes with a virtual environment.
    unpinned = {name for name in seen - constraints().keys() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert unpinned <= {"setuptools"}


def test_every_package_that_is_imported_is_declared() -> None:
    imported: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.split(".")[0])
    providers = packages_distributions()
    third_party = imported - sys.stdlib_module_names - set(PACKAGES)
    needed = {canonicalize_name(name) for module in third_party for name in providers[module]}
    extras = PROJECT["project"]["optional-dependencies"]
    optional = [text for extra, texts in extras.items() if extra != "test" for text in texts]
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"] + optional}
    assert needed >= {"torch", "prefect"}
    assert needed <= declared


def test_the_installed_versions_are_the_pinned_ones() -> None:
    pins = constraints()
    for name in ("torch", "transformers", "prefect", "safetensors", "tokenizers"):
        assert distribution(name).version.split("+")[0] == pins[name]


@pytest.mark.parametrize(
    "entrypoint", ["flows.quantize_model.quantize_model", "{root}/flows/quantize_model.py:quantize_model"]
)
def test_prefect_loads_the_flow_by_module_and_by_file_from_any_directory(entrypoint: str, tmp_path: Path) -> None:
    script = (
        "import sys; from prefect.flows import load_flow_from_entrypoint as load; "
        "flow = load(sys.argv[1], use_placeholder_flow=False); print(flow.name, *flow.parameters.properties)"
    )
    environment_path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, entrypoint.format(root=ROOT)],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "DO_NOT_TRACK": "1",
            **environment_path,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["quantize-model", "job", "deadline"], done.stderr


def test_the_operators_commands_start_without_torch_and_prefect() -> None:
    script = (
        "import sys; from flows import cli; cli._parser(); "
        "print(*sorted({'torch', 'prefect', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_licence_is_apache_and_the_version_is_the_projects() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert re.search(r"Apache License\s+Version 2\.0", (ROOT / "LICENSE").read_text())
