"""Imports go down the order of dependence only, and the core needs torch alone.

    engine ← solvers, adjoints, ops ← entry ← problems ← certify ← nn ← models
           ← training, evaluation, sklearn, adapters ← serving ← cli

The study of the papers (``equilibria_papers``) imports what the packages of the library export, and
nothing of their insides.

The files are read, not imported: imports inside functions and under ``TYPE_CHECKING`` count too.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = "equilibria"
PAPERS = "equilibria_papers"
ROOT_FOLDER = Path(__file__).resolve().parent.parent
SOURCE = ROOT_FOLDER / "src" / PACKAGE
PAPERS_SOURCE = ROOT_FOLDER / "papers" / "src" / PAPERS

# A package, or a module beside the packages, may import the ranks before its own and nothing else.
RANKS: tuple[tuple[str, ...], ...] = (
    ("engine",),
    ("solvers", "adjoints", "ops"),
    ("entry",),
    ("problems",),
    ("certify",),
    ("nn",),
    ("models",),
    ("training", "evaluation", "sklearn", "adapters"),
    ("serving",),
    ("cli",),
    ("__main__",),
)
CORE = frozenset({"engine", "solvers", "adjoints", "ops", "entry", "problems", "certify", "nn"})
# Triton comes with the GPU builds of torch; ops/ looks for it only there.
CORE_DEPENDENCIES = frozenset({"torch", "triton", *sys.stdlib_module_names})
# The package's own __init__ re-exports every package; ROOT stands for it.
ROOT = "the package root"
# Modules with no imports of ours, open to all.
LEAVES = frozenset({"_version", "experiments", "theory"})


def _allowed() -> dict[str, frozenset[str]]:
    """For each package, the others that it may import."""
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


def _imports(source: str, top: str, path: Path) -> Iterator[tuple[int, list[str], str]]:
    """Line, module and name of everything that the file at ``path`` below ``top`` imports.

    ``import a.b`` has no name. A module that cannot be known is one in parentheses.
    """
    package = [top, *path.parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split("."), "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = above + (node.module.split(".") if node.module else [])
            if node.level > len(package):
                base = ["(beyond the root)"]
            yield from ((node.lineno, base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "_import_module", "__import__"):
                match node.args:
                    case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                        yield node.lineno, name.split("."), ""
                    case _:
                        yield node.lineno, ["(computed at run time)"], ""


def violations(source: str, path: Path) -> list[str]:
    """What ``source``, at ``path`` relative to the package, imports against the order."""
    own = ROOT if path.parts == ("__init__.py",) else path.with_suffix("").parts[0]
    if own not in ALLOWED:
        return [f"{path}: {own!r} has no rank; give it one in {Path(__file__).name}"]
    found = []
    for line, base, name in _imports(source, PACKAGE, path):
        where, module = f"{path}:{line}: {own}", ".".join(base)
        if base[0] == PACKAGE:
            # `from equilibria import solvers` names a package; any other name is the root's.
            inside = base[1:] or ([name] if name in ALLOWED else [ROOT])
            if inside[0] != own and inside[0] not in ALLOWED[own]:
                found.append(f"{where} may not import {inside[0]} ({module})")
        elif base[0] == PAPERS:
            found.append(f"{where} may not import the papers ({module}): they plug themselves in")
        elif base[0].startswith("("):
            found.append(f"{where} imports a name that cannot be checked: {module}")
        elif own in CORE | LEAVES | {ROOT} and base[0] not in CORE_DEPENDENCIES:
            found.append(f"{where} is core and may not import {base[0]}; it needs torch alone")
    return found


# The papers' own order: tables and claims know the theory, and commands know all.
PAPERS_ALLOWED = {
    "theory": frozenset[str](),
    "claims": frozenset({"theory"}),
    "tables": frozenset({"theory"}),
    "cli": frozenset({"theory", "claims", "tables"}),
}


def papers_violations(source: str, path: Path) -> list[str]:
    """What ``source``, at ``path`` relative to the papers' package, must not import."""
    found, own = [], path.parts[0]
    for line, base, name in _imports(source, PAPERS, path):
        if base[0] == PACKAGE and not _exports(".".join(base), name):
            found.append(f"{path}:{line}: {'.'.join(base)} exports no {name}")
        part = [*base, name][1] if base[0] == PAPERS else ""
        if part and part != own and part not in PAPERS_ALLOWED.get(own, ()):
            found.append(f"{path}:{line}: {own} may not import {part}")
    return found


@lru_cache
def _exports(module: str, name: str) -> bool:
    """Whether a package of the library, or the root, has the name in its ``__all__``."""
    if not (SOURCE.parent / module.replace(".", "/") / "__init__.py").is_file():
        return False
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    return name in {"", *import_module(module).__all__} or (module == PACKAGE and name in packages)


@pytest.mark.parametrize(
    ("folder", "check"), [(SOURCE, violations), (PAPERS_SOURCE, papers_violations)]
)
def test_imports_keep_the_order(folder: Path, check: Callable[[str, Path], list[str]]) -> None:
    paths = sorted(folder.rglob("*.py"))
    assert paths, f"no sources under {folder}"
    found = [
        violation
        for path in paths
        for violation in check(path.read_text(encoding="utf-8"), path.relative_to(folder))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("package", ["problems", "certify"])
def test_files_of_a_package_import_each_other_one_way(package: str) -> None:
    """No cycles, not even inside functions or under ``TYPE_CHECKING``."""
    graph: dict[str, set[str]] = {}
    for path in sorted((SOURCE / package).glob("*.py")):
        found = _imports(path.read_text(encoding="utf-8"), PACKAGE, path.relative_to(SOURCE))
        inside = [base[2:] for _, base, _ in found if base[:2] == [PACKAGE, package]]
        graph[path.stem] = {(module or ["__init__"])[0] for module in inside}
    assert graph["__init__"], "the package imports none of its files"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


# The checkers themselves, on sources that were never written.


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/tree.py", "import torch\nfrom math import sqrt\nfrom .norms import norm"),
        ("engine/tree.py", "x = 'import numpy'  # import scipy\nimport_module('math')"),
        ("engine/__init__.py", "from .tree import norm\nfrom .._version import __version__"),
        ("solvers/picard.py", "from ..engine.tree import norm\nfrom .. import engine"),
        ("solvers/deep/a.py", "from ...engine import norm"),
        ("entry.py", "from .solvers import Anderson\nfrom .adjoints import Implicit"),
        ("__init__.py", "from .cli import main\nfrom . import nn\nfrom ._version import x"),
        ("data/arrow.py", "import pyarrow\nfrom ..engine import tree"),
        ("training/fit.py", "import lightning\nfrom ..data import a"),
        ("cli/main.py", "import typer\nfrom ..training import a"),
    ],
)
def test_checker_accepts(path: str, source: str) -> None:
    assert violations(source, Path(path)) == []


@pytest.mark.parametrize(
    ("path", "source", "named"),
    [
        # Upwards, in every spelling.
        ("engine/a.py", "import equilibria.solvers.picard as p", "solvers"),
        ("engine/a.py", "from equilibria.adjoints import X", "adjoints"),
        ("engine/a.py", "from .. import solvers", "solvers"),
        ("engine/a.py", "from equilibria import entry", "entry"),
        ("engine/b/c.py", "from ...nn import X", "nn"),
        ("engine/a.py", "import math, equilibria.nn", "nn"),
        ("engine/a.py", "def f():\n    from ..nn import X", "a.py:2"),
        ("engine/a.py", "if TYPE_CHECKING:\n    from ..problems import P", "problems"),
        ("engine/a.py", "try:\n    from ..ops import k\nexcept ImportError: ...", "ops"),
        ("engine/a.py", "import importlib\nimportlib.import_module('equilibria.nn')", "nn"),
        ("engine/a.py", "import_module('.nn', 'equilibria')", "cannot be checked"),
        ("engine/a.py", "__import__(name)", "cannot be checked"),
        # Between packages.
        ("solvers/a.py", "from ..adjoints import X", "adjoints"),
        ("sklearn/a.py", "from ..training import X", "training"),
        ("entry.py", "from .problems import Problem", "problems"),
        ("data/a.py", "from ..solvers import X", "solvers"),
        ("models/a.py", "from ..data import X", "data"),
        ("cli/a.py", "import equilibria_papers", "papers"),
        # The root, other libraries, names that do not exist.
        ("nn/a.py", "import equilibria as eq", "root"),
        ("nn/a.py", "from equilibria import Anderson", "root"),
        ("nn/a.py", "from .. import *", "root"),
        ("nn/a.py", "from .... import x", "cannot be checked"),
        ("engine/a.py", "import numpy as np", "numpy"),
        ("nn/a.py", "from scipy.linalg import solve", "scipy"),
        ("entry.py", "def f():\n    import rich", "rich"),
        ("__init__.py", "import numpy", "numpy"),
        ("_version.py", "from .engine import X", "engine"),
        ("attic/a.py", "import math", "no rank"),
        ("nn/a.py", "import equilibria.attic", "attic"),
    ],
)
def test_checker_catches(path: str, source: str, named: str) -> None:
    found = violations(source, Path(path))
    assert len(found) == 1
    assert named in found[0]


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
