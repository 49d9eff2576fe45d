"""Rules of the house that only the source can break: one door to the file system, and imports that point one way."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "checkpoint_store", "deployments")

# Modules that reach the file system, and what the store may use of them outside its door.
DOORS = {
    "os": {"getpid", "fspath", "PathLike", "environ", "cpu_count", "register_at_fork", "strerror", "urandom"},
    "pathlib": {"Path", "PurePath", "PurePosixPath"},
    "io": {"BytesIO"},
    "fcntl": set(),
    "mmap": set(),
    "shutil": set(),
    "tempfile": set(),
    "glob": set(),
    "ctypes": set(),
    "subprocess": set(),
}
BUILTINS = {"open", "exec", "eval", "compile", "__import__"}
# Methods of `pathlib.Path` and file objects of other libraries that open, list or change something.
PATH_METHODS = {
    "open", "read_bytes", "read_text", "write_bytes", "write_text", "exists", "is_file", "is_dir", "is_symlink", "is_mount",
    "iterdir", "glob", "rglob", "walk", "mkdir", "rmdir", "touch", "rename", "unlink", "symlink_to", "hardlink_to",
    "chmod", "lchmod", "owner", "group", "samefile", "resolve", "readlink", "expanduser", "lstat", "stat",
}  # fmt: skip
FILE_FUNCTIONS = {"save_file", "load_file", "safe_open", "from_file", "memmap", "tofile", "fromfile", "savez"}

# Which top-level names of the project and which libraries a module may not import.
FORBIDDEN_IMPORTS = {
    "tasks/methods": {"prefect", "checkpoint_store", "flows", "tasks.models", "tasks.formats", "deployments"},
    "tasks/formats": {"prefect", "checkpoint_store", "flows", "tasks.models", "deployments"},
    "tasks/models": {"prefect", "checkpoint_store", "flows", "deployments"},
    "tasks": {"flows", "deployments"},
    "checkpoint_store": {"torch", "prefect", "flows", "tasks", "transformers", "safetensors", "deployments"},
    "flows": {"deployments"},
}
ALLOWED_IMPORTS = {
    "checkpoint_store/tensors.py": {"torch"},
    "checkpoint_store/result_storage.py": {"prefect"},
    "flows/commands_deploy.py": {"deployments"},  # the commands that hand the flows to a server
}


def sources(package: str) -> list[Path]:
    return sorted((PROJECT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import anywhere in `tree`, in functions too; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def file_system_calls(source: str) -> list[str]:
    """Where `source` reaches the file system without the door."""
    tree = ast.parse(source)
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {(alias.asname or alias.name).split(".")[0]: alias.name.split(".")[0] for alias in node.names}
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ImportFrom) and node.module in DOORS:
            allowed = DOORS[node.module]
            found += [f"line {line}: {node.module}.{alias.name}" for alias in node.names if alias.name not in allowed]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and bound.get(node.value.id) in DOORS:
            module = bound[node.value.id]
            if node.attr not in DOORS[module]:
                found.append(f"line {line}: {module}.{node.attr}")
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in BUILTINS | FILE_FUNCTIONS:
                found.append(f"line {line}: {function.id}(...)")
            elif isinstance(function, ast.Attribute) and _is_file_method(function):
                found.append(f"line {line}: .{function.attr}(...)")
    return found


def _is_file_method(function: ast.Attribute) -> bool:
    """Whether `receiver.method` opens or changes files, unless the receiver is the door or an object or class of ours."""
    receiver = ast.unparse(function.value).split("(")[0].rsplit(".", 1)[-1]
    is_ours = receiver in {"disk", "_disk", "self", "cls"} or (receiver[:1].isupper() and receiver != "Path")
    return function.attr in FILE_FUNCTIONS or (function.attr in PATH_METHODS and not is_ours)


@pytest.mark.parametrize("path", [path for path in sources("checkpoint_store") if path.name != "disk.py"], ids=name_of)
def test_only_the_door_touches_the_file_system(path: Path):
    assert file_system_calls(path.read_text()) == []


@pytest.mark.parametrize("path", sources("tasks/methods") + sources("tasks/formats"), ids=name_of)
def test_methods_and_formats_touch_no_files(path: Path):
    assert file_system_calls(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "import os\nos.rename('a', 'b')",
        "import os as system\nsystem.unlink('a')",
        "from os import replace\nreplace('a', 'b')",
        "from pathlib import Path\nPath('x').write_bytes(b'')",
        "path.unlink()",
        "def f():\n    import shutil\n    shutil.rmtree('x')",
        "from safetensors.torch import save_file\nsave_file({}, 'x')",
        "import mmap\nmmap.mmap(0, 1)",
        "import fcntl\nfcntl.flock(0, 2)",
        "self.root.exists()",
        "eval('open')",
    ],
)
def test_a_way_around_the_door_is_seen(source: str):
    assert file_system_calls(source)


@pytest.mark.parametrize(
    "source", ["self.disk.open_root('x')", "disk.rename(1, 'a', 2, 'b')", "import os\nos.getpid()"]
)
def test_the_door_itself_is_not_taken_for_a_way_around_it(source: str):
    assert file_system_calls(source) == []


def forbidden(path: str) -> set[str]:
    """What a module may not import: the rule of the deepest folder that has one."""
    folder = max((name for name in FORBIDDEN_IMPORTS if path.startswith(f"{name}/")), key=len, default="")
    return FORBIDDEN_IMPORTS.get(folder, set()) - ALLOWED_IMPORTS.get(path, set())


def wrong_imports(source: str, path: str) -> list[str]:
    package = path.rsplit("/", 1)[0].replace("/", ".")
    return [
        f"line {line}: {name}"
        for line, name in imports(ast.parse(source), package)
        if any(name == other or name.startswith(f"{other}.") for other in forbidden(path))
    ]


@pytest.mark.parametrize("path", [path for package in PACKAGES for path in sources(package)], ids=name_of)
def test_imports_point_one_way(path: Path):
    assert wrong_imports(path.read_text(), name_of(path)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tasks/methods/gptq.py", "from prefect import task"),
        ("tasks/methods/gptq.py", "from tasks.models.decoder import Decoder"),
        ("tasks/methods/gptq.py", "from ..models import decoder"),
        ("tasks/formats/gptq.py", "def f():\n    import checkpoint_store.store"),
        ("tasks/models/source.py", "from checkpoint_store import store"),
        ("checkpoint_store/store.py", "import torch"),
        ("checkpoint_store/tensors.py", "import prefect"),
        ("checkpoint_store/result_storage.py", "from torch import Tensor"),
        ("tasks/export.py", "from flows.cli import main"),
    ],
)
def test_an_import_against_the_grain_is_seen(path: str, source: str):
    assert wrong_imports(source, path)


def test_the_store_can_be_imported_without_torch_and_without_prefect():
    """What the syntax trees cannot show: nothing that the store imports pulls them in either."""
    modules = [
        name_of(path)[: -len(".py")].replace("/", ".")
        for path in sources("checkpoint_store")
        if name_of(path) not in ALLOWED_IMPORTS and path.name != "__init__.py"
    ]
    program = f"import sys, {', '.join(modules)}; print([name for name in ('torch', 'prefect') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
