"""Imports go down the order of dependence only, and the core needs torch alone.

    engine ← solvers, adjoints, ops ← entry ← problems ← certify ← nn ← models
           ← training, evaluation, sklearn ← cli

The study of the papers (``equilibria_papers``) imports what the packages of the library export, and
nothing of their insides.

The files are read, not imported: imports inside functions and under ``TYPE_CHECKING`` count too.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = "equilibria"
PAPERS = "equilibria_papers"
ROOT_FOLDER = Path(__file__).resolve().parent.parent
SOURCE = ROOT_FOLDER / "src" / PACKAGE
PAPERS_SOURCE = ROOT_FOLDER / "papers" / "src" / PAPERS

# A room, or a module beside the rooms, may import the ranks before its own and nothing else.
RANKS: tuple[tuple[str, ...], ...] = (
    ("engine",),
    ("solvers", "adjoints", "ops"),
    ("entry",),
    ("problems",),
    ("certify",),
    ("nn",),
    ("models",),
    ("training", "evaluation", "sklearn"),
    ("cli",),
    ("__main__",),
)
CORE = frozenset({"engine", "solvers", "adjoints", "ops", "entry", "problems", "certify", "nn"})
# Triton comes with the GPU builds of torch; ops/ looks for it only there.
CORE_DEPENDENCIES = frozenset({"torch", "triton"})

# The package's own __init__ re-exports every room; ROOT stands for it.
ROOT = "the package root"
# Modules with no imports of ours, open to all.
LEAVES = frozenset({"_version", "experiments", "theory"})


def _allowed() -> dict[str, frozenset[str]]:
    """For each room, the other rooms that it may import."""
    allowed: dict[str, frozenset[str]] = {leaf: frozenset() for leaf in LEAVES}
    below = LEAVES
    for rank in RANKS:
        allowed.update(dict.fromkeys(rank, below))
        below |= frozenset(rank)
        if "models" in rank:
            # Data stands beside the models: the engine's trees are all that it may use.
            allowed["data"] = LEAVES | {"engine"}
            below |= {"data"}
    allowed[ROOT] = below
    return allowed


ALLOWED = _allowed()


def _room(module: str) -> str:
    """``equilibria.solvers.anderson`` → ``solvers``; ``equilibria`` → ROOT."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ROOT


def _name(path: Path) -> tuple[str, bool]:
    """A path relative to the package, as a dotted name, and whether it is a package."""
    parts = [PACKAGE, *path.with_suffix("").parts]
    if parts[-1] == "__init__":
        return ".".join(parts[:-1]), True
    return ".".join(parts), False


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that is imported, wherever it is imported."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                if node.level > len(package):
                    yield node.lineno, "." * node.level + ".".join(base)
                    continue
                base = package[: len(package) - node.level + 1] + base
            for alias in node.names:
                # `from equilibria import solvers` names a room; any other name is the root's.
                names_room = base == [PACKAGE] and alias.name in ALLOWED
                yield node.lineno, ".".join([*base, alias.name] if names_room else base)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "_import_module", "__import__"):
                # A name that is not written out cannot be checked, so it does not pass.
                match node.args:
                    case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                        yield node.lineno, name
                    case _:
                        yield node.lineno, "(computed at run time)"


def violations(source: str, path: Path) -> list[str]:
    """What `source`, at `path` relative to the package, imports against the order."""
    module, is_package = _name(path)
    room = _room(module)
    if room not in ALLOWED:
        return [f"{path}: {room!r} has no rank; give it one in {Path(__file__).name}"]
    found = []
    for line, name in _imports(ast.parse(source), module, is_package):
        where = f"{path}:{line}: {room}"
        top = name.split(".")[0]
        if top == PACKAGE:
            target = _room(name)
            if target != room and target not in ALLOWED[room]:
                found.append(f"{where} may not import {target} ({name})")
        elif top == PAPERS:
            found.append(f"{where} may not import the papers ({name}): they plug themselves in")
        elif not top or top.startswith("("):
            found.append(f"{where} imports a name that cannot be checked: {name}")
        elif (
            room in CORE | LEAVES | {ROOT}
            and top not in CORE_DEPENDENCIES
            and top not in sys.stdlib_module_names
        ):
            found.append(f"{where} is core and may not import {top}; the core needs torch alone")
    return found


def test_imports_go_downwards_only() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert paths, f"no sources under {SOURCE}"
    found = [
        violation
        for path in paths
        for violation in violations(path.read_text(encoding="utf-8"), path.relative_to(SOURCE))
    ]
    assert not found, "\n" + "\n".join(found)


# The papers' own order: tables and claims know the theory, and commands know all.
PAPERS_ALLOWED = {
    "theory": frozenset[str](),
    "claims": frozenset({"theory"}),
    "tables": frozenset({"theory"}),
    "cli": frozenset({"theory", "claims", "tables"}),
}


def papers_violations(source: str, path: Path) -> list[str]:
    """What ``source``, at ``path`` relative to the papers' package, must not import."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            given = [(alias.name.split("."), "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = [PAPERS, *path.parts[:-1]]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = above + (node.module.split(".") if node.module else [])
            given = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, name in given:
            if base[0] == PACKAGE and not _exports(".".join(base), name):
                found.append(f"{path}:{node.lineno}: {'.'.join(base)} exports no {name}")
            part = [*base, name][1] if base[0] == PAPERS else ""
            own = path.parts[0]
            if part and part != own and part not in PAPERS_ALLOWED.get(own, ()):
                found.append(f"{path}:{node.lineno}: {own} may not import {part}")
    return found


@lru_cache
def _exports(module: str, name: str) -> bool:
    """Whether a package of the library, or the root, has the name in its ``__all__``."""
    if not (SOURCE.parent / module.replace(".", "/") / "__init__.py").is_file():
        return False
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    return name in {"", *import_module(module).__all__} or (module == PACKAGE and name in packages)


def test_the_papers_import_what_the_library_exports() -> None:
    paths = sorted(PAPERS_SOURCE.rglob("*.py"))
    assert paths, f"no sources under {PAPERS_SOURCE}"
    found = [
        violation
        for path in paths
        for violation in papers_violations(
            path.read_text(encoding="utf-8"), path.relative_to(PAPERS_SOURCE)
        )
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "fine"),
    [
        ("from equilibria.solvers import Anderson", True),
        ("from equilibria import data, Anderson", True),
        ("import equilibria as eq", True),
        ("from equilibria_papers.theory import spectrum", True),
        ("from ..theory.pictures import new_figure", True),
        ("from equilibria.solvers.anderson import Anderson", False),
        ("from equilibria.solvers import _helper", False),
        ("import equilibria.solvers.anderson", False),
        ("def f():\n    from equilibria.engine.tree import norm", False),
        ("from ..cli import audit", False),
        ("from equilibria_papers.claims import Claim", False),
    ],
)
def test_papers_checker(source: str, fine: bool) -> None:
    assert bool(papers_violations(source, Path("tables/a.py"))) is not fine


@pytest.mark.parametrize("room", ["problems", "certify"])
def test_files_of_a_package_import_each_other_one_way(room: str) -> None:
    """No cycles, not even inside functions or under ``TYPE_CHECKING``."""
    graph: dict[str, set[str]] = {}
    for path in sorted((SOURCE / room).glob("*.py")):
        module, is_package = _name(path.relative_to(SOURCE))
        found = _imports(ast.parse(path.read_text(encoding="utf-8")), module, is_package)
        graph[module] = {name for _, name in found if name.startswith(f"{PACKAGE}.{room}")}
    assert graph[f"{PACKAGE}.{room}"], "the package imports none of its files"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


# The checker itself, on sources that were never written.


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param("engine/tree.py", "import torch\nfrom math import sqrt", id="torch-stdlib"),
        pytest.param("engine/__init__.py", "from .tree import norm", id="same-room-package"),
        pytest.param("engine/tree.py", "from .norms import norm", id="same-room"),
        pytest.param("solvers/picard.py", "from equilibria.engine.tree import norm", id="down"),
        pytest.param("solvers/picard.py", "from ..engine.tree import norm", id="down-relative"),
        pytest.param("solvers/picard.py", "from .. import engine", id="down-relative-room"),
        pytest.param("solvers/picard.py", "from equilibria import engine", id="down-room"),
        pytest.param("solvers/deep/a.py", "from ...engine import norm", id="down-from-subpackage"),
        pytest.param("entry.py", "from .solvers import Anderson", id="entry-solvers"),
        pytest.param("entry.py", "from .adjoints import Implicit", id="entry-adjoints"),
        pytest.param("problems/problem.py", "from ..entry import fixed_point", id="problems-entry"),
        pytest.param("__init__.py", "from .cli import main\nfrom . import nn", id="root-any"),
        pytest.param("__init__.py", "from ._version import __version__", id="root-version"),
        pytest.param("engine/tree.py", "from .._version import __version__", id="leaf"),
        pytest.param("data/arrow.py", "import pyarrow\nfrom ..engine import tree", id="data"),
        pytest.param("training/fit.py", "import lightning\nfrom ..data import a", id="extras"),
        pytest.param("cli/main.py", "import typer\nfrom ..training import a", id="cli"),
        pytest.param("models/zoo.py", "import timm", id="models-are-not-core"),
        pytest.param("engine/tree.py", "x = 'import numpy'  # import scipy", id="text"),
        pytest.param(
            "engine/tree.py", "import importlib\nimportlib.import_module('math')", id="dynamic"
        ),
    ],
)
def test_checker_accepts(path: str, source: str) -> None:
    assert violations(source, Path(path)) == []


@pytest.mark.parametrize(
    ("path", "source", "named"),
    [
        pytest.param("engine/a.py", "import equilibria.solvers", "solvers", id="up"),
        pytest.param("engine/a.py", "import equilibria.solvers.picard as p", "solvers", id="up-as"),
        pytest.param("engine/a.py", "from equilibria.adjoints import X", "adjoints", id="up-from"),
        pytest.param("engine/a.py", "from ..solvers.picard import X", "solvers", id="up-relative"),
        pytest.param("engine/a.py", "from .. import solvers", "solvers", id="up-relative-room"),
        pytest.param("engine/a.py", "from equilibria import entry", "entry", id="up-room"),
        pytest.param("engine/__init__.py", "from ..nn import X", "nn", id="up-from-package"),
        pytest.param("engine/b/c.py", "from ...nn import X", "nn", id="up-from-subpackage"),
        pytest.param("engine/a.py", "import math, equilibria.nn", "nn", id="up-second-name"),
        pytest.param(
            "engine/a.py", "def f():\n    from ..nn import X", "a.py:2", id="inside-function"
        ),
        pytest.param(
            "engine/a.py",
            "class A:\n    async def f(self):\n        import equilibria.cli",
            "cli",
            id="inside-method",
        ),
        pytest.param(
            "engine/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..problems import P",
            "problems",
            id="type-checking",
        ),
        pytest.param(
            "engine/a.py", "try:\n    from ..ops import k\nexcept ImportError: ...", "ops", id="try"
        ),
        pytest.param(
            "engine/a.py",
            "import importlib\nimportlib.import_module('equilibria.nn')",
            "nn",
            id="dynamic",
        ),
        pytest.param(
            "engine/a.py",
            "from importlib import import_module\nimport_module('.nn', 'equilibria')",
            "cannot be checked",
            id="dynamic-relative",
        ),
        pytest.param("engine/a.py", "__import__(name)", "cannot be checked", id="dynamic-computed"),
        pytest.param("solvers/a.py", "from ..adjoints import X", "adjoints", id="same-rank-1"),
        pytest.param("adjoints/a.py", "from ..solvers import X", "solvers", id="same-rank-2"),
        pytest.param("ops/a.py", "from ..solvers import X", "solvers", id="same-rank-3"),
        pytest.param("solvers/a.py", "from ..ops import X", "ops", id="same-rank-4"),
        pytest.param("sklearn/a.py", "from ..training import X", "training", id="same-rank-5"),
        pytest.param("solvers/a.py", "from ..entry import fixed_point", "entry", id="entry-above"),
        pytest.param("entry.py", "from .problems import Problem", "problems", id="entry-below"),
        pytest.param("problems/a.py", "from ..certify import X", "certify", id="problems-certify"),
        pytest.param("certify/a.py", "from ..nn import X", "nn", id="certify-nn"),
        pytest.param("data/a.py", "from ..solvers import X", "solvers", id="data-up"),
        pytest.param("models/a.py", "from ..data import X", "data", id="models-data"),
        pytest.param("models/a.py", "from ..training import X", "training", id="models-up"),
        pytest.param("training/a.py", "from ..cli import X", "cli", id="training-up"),
        pytest.param("cli/a.py", "import equilibria_papers", "papers", id="library-papers"),
        pytest.param("nn/a.py", "import equilibria as eq", "root", id="root"),
        pytest.param("nn/a.py", "from equilibria import Anderson", "root", id="root-name"),
        pytest.param("nn/a.py", "from .. import *", "root", id="root-star"),
        pytest.param("nn/a.py", "from .... import x", "cannot be checked", id="beyond-root"),
        pytest.param("engine/a.py", "import numpy as np", "numpy", id="core-third-party"),
        pytest.param("nn/a.py", "from scipy.linalg import solve", "scipy", id="core-from"),
        pytest.param("entry.py", "def f():\n    import rich", "rich", id="core-inside-function"),
        pytest.param("__init__.py", "import numpy", "numpy", id="root-third-party"),
        pytest.param("_version.py", "from .engine import X", "engine", id="leaf-imports"),
        pytest.param("attic/a.py", "import math", "no rank", id="unknown-room"),
        pytest.param("nn/a.py", "import equilibria.attic", "attic", id="unknown-target"),
    ],
)
def test_checker_catches(path: str, source: str, named: str) -> None:
    found = violations(source, Path(path))
    assert len(found) == 1
    assert named in found[0]


def test_every_room_has_one_rank() -> None:
    rooms = [room for rank in RANKS for room in rank]
    assert len(rooms) == len(set(rooms))
    assert set(rooms) >= CORE
