"""Who may import whom: the rooms of the house, and what must stay out of each of them.

Reads the source, so that an import inside a function or under TYPE_CHECKING counts as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"cbdisagg": ROOT / "cbdisagg", "cbdisagg_kernels": ROOT / "kernels", "cbdisagg_bench": ROOT / "bench"}

MAY_IMPORT: dict[str, set[str]] = {
    "messages": set(),
    "config": set(),
    "misfit": set(),
    "validate": {"config"},
    "load": {"config", "validate"},
    "prepare": {"config", "load", "validate", "engine.gguf", "engine.weight_files"},
    "core": {"core", "messages", "config"},
    "sim": {"sim", "core", "messages", "config", "misfit"},
    "engine": {"engine", "messages", "config", "transfer.base", "kernels"},
    "transfer": {"transfer", "messages", "config"},
    "api": {"api", "messages", "config", "actors.mailbox"},
    "kernels": {"kernels"},
}
"""Room -> the rooms, or modules, of ours that it may use. Those not named (actors, cli, llm, bench) may use all."""

IMPURE = {"asyncio", "time", "random", "os", "logging", "threading", "torch", "numpy", "pathlib", "socket"}
OUTSIDE: dict[str, set[str]] = {
    "core": IMPURE,
    "messages": IMPURE,
    "config": IMPURE,
    "misfit": IMPURE,
    "validate": IMPURE,
    "sim": IMPURE - {"numpy"},
    "api": {"torch", "transformers"},
    "engine": {"asyncio"},
    "transfer": {"torch", "asyncio"},
    "kernels": {"asyncio", "transformers"},
}
"""Room -> what of others' must stay out."""

NOWHERE = {"pickle", "cPickle", "dill", "cloudpickle", "multiprocessing"}
ZMQ_ONLY_IN = ("cbdisagg.actors.mailbox", "cbdisagg.transfer.", "cbdisagg_bench.")


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is installed."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    """`cbdisagg.core.blocks` -> core, `cbdisagg.load` -> load, `cbdisagg_kernels.rope` -> kernels."""
    package, _, rest = module.partition(".")
    return package.removeprefix("cbdisagg_") if package != "cbdisagg" else rest.split(".")[0]


def allowed(imported: str, rooms: set[str]) -> bool:
    path = imported.removeprefix("cbdisagg_") if imported.startswith("cbdisagg_") else imported.partition(".")[2]
    return any(path == name or path.startswith(f"{name}.") for name in rooms)


def is_ours(imported: str) -> bool:
    return imported.split(".")[0] in PACKAGES


def test_the_rooms_are_there() -> None:
    assert {room(module) for module in MODULES} >= MAY_IMPORT.keys()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_stays_in_its_room(module: str) -> None:
    rooms, outside = MAY_IMPORT.get(room(module)), OUTSIDE.get(room(module), set())
    for imported in imports(MODULES[module]):
        top = imported.split(".")[0]
        assert top not in NOWHERE, f"{module} imports {imported}"
        if is_ours(imported):
            assert rooms is None or allowed(imported, rooms), f"{module} imports {imported}"
        else:
            assert top not in outside, f"{module} imports {imported}"
            assert top != "zmq" or module.startswith(ZMQ_ONLY_IN), f"{module} imports {imported}"


def test_the_api_process_loads_neither_torch_nor_transformers() -> None:
    """What it imports may import in turn, which the source does not show."""
    names = [module for module in MODULES if room(module) == "api"]
    code = f"import sys, {', '.join(names)}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_worker_on_a_cpu_loads_neither_triton_nor_transformers() -> None:
    """75 MiB and a second, and 80 MiB and two."""
    names = "cbdisagg.actors.worker, cbdisagg.engine.build"
    code = f"import sys, {names}; print(sorted({{'triton', 'transformers'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_kernels_folder_is_no_package() -> None:
    """transformers imports a top-level package that is called kernels, if there is one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
