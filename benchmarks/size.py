"""The size of both packages and of related libraries, and the files that a job crosses.

    python benchmarks/size.py --before REVISION

writes results/size.json and results/size.md. Lines are those of the Python files of a package, as
``wc -l`` counts them. "Crossed" counts the files of a package in which a line runs during one
Anderson solve, and during ``equilibria train`` on the digits (one epoch). The peers are installed
into a temporary folder, without their dependencies, and only counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("torchdeq", "optimistix", "equinox", "gpytorch", "jaxopt")

_CROSSED = """
import json, sys
from pathlib import Path
seen = set()
def watch(frame, event, arg):
    seen.add(frame.f_code.co_filename)
job, packages = sys.argv[1], sys.argv[2].split(",")
import torch
{prepare}
sys.setprofile(watch)
try:
    {run}
except SystemExit:
    pass
sys.setprofile(None)
files = [f for f in seen if any("/" + p + "/" in f for p in packages)]
print("CROSSED", len(files))
"""
_JOBS = {
    "Anderson solve": (
        "import equilibria as eq\neq.Anderson, eq.fixed_point  # bound on first use\n"
        "W = 0.1 * torch.randn(8, 8)\nx = torch.randn(4, 8)",
        "eq.fixed_point(lambda z, x: torch.tanh(z @ W.T + x), torch.zeros(4, 8), (x,), "
        "solver=eq.Anderson())",
    ),
    "Anderson solve of torchdeq": (
        "from torchdeq import get_deq\nW = 0.1 * torch.randn(8, 8)\nx = torch.randn(4, 8)\n"
        "deq = get_deq(f_solver='anderson', f_max_iter=20)",
        "deq(lambda z: torch.tanh(z @ W.T + x), torch.zeros(4, 8))",
    ),
    "train on digits": (
        "from equilibria.cli.app import main\nimport equilibria.cli.app as cli\n"
        "cli.app, __import__('equilibria').nn, __import__('equilibria.training')",
        "main(['train', '--epochs', '1', '--samples', '64', '--quiet', '--out', sys.argv[3]])",
    ),
}


def count(folder: Path) -> dict[str, int]:
    """Lines and files of the Python code below a folder."""
    files = [p for p in folder.rglob("*.py") if "__pycache__" not in p.parts]
    return {
        "lines": sum(p.read_bytes().count(b"\n") for p in files),
        "files": len(files),
    }


def crossed(job: str, sources: list[Path], packages: str) -> int:
    """The number of files of the packages in which code runs during a job, in its own process."""
    prepare, run = _JOBS[job]
    code = _CROSSED.format(prepare=prepare, run=run)
    path = os.pathsep.join(str(s) for s in sources)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, job, packages, f"{folder}/run"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    for line in done.stdout.splitlines():
        if line.startswith("CROSSED"):
            return int(line.split()[1])
    raise RuntimeError(f"{job} failed:\n{done.stdout}\n{done.stderr}")


def tree(root: Path) -> dict[str, Any]:
    """All numbers of a checkout."""
    library = root / "src" / "equilibria"
    papers = root / "papers" / "src" / "equilibria_papers"
    sources = [root / "src", root / "papers" / "src"]
    inside = [library / name for name in ("theory", "experiments")]  # their former place
    studies = [papers, *inside]
    parts = {
        "library": count(library),
        "papers": {
            key: sum(count(p)[key] for p in studies if p.is_dir()) for key in ("lines", "files")
        },
        "tests": {
            key: sum(count(p)[key] for p in (root / "tests", root / "papers" / "tests"))
            for key in ("lines", "files")
        },
    }
    for folder in inside:
        if folder.is_dir():
            for key, value in count(folder).items():
                parts["library"][key] -= value
    names = "equilibria,equilibria_papers"
    jobs = {job: crossed(job, sources, names) for job in ("Anderson solve", "train on digits")}
    return {**parts, "crossed": jobs}


def peers() -> dict[str, dict[str, int]]:
    """Lines and files of the peers, from the packages as published."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, folder, *PEERS], check=True)
        for name in PEERS:
            found[name] = count(Path(folder) / name)
    return found


def table(before: dict[str, Any], after: dict[str, Any], others: dict[str, Any]) -> str:
    """One row per package, ours before and after, then the peers."""
    jobs = list(after["crossed"])
    rows = [f"| package | lines | files | {' | '.join(f'files crossed: {j}' for j in jobs)} |"]
    rows.append("|---|---:|---:|" + "---:|" * len(jobs))
    for name in ("library", "papers", "tests"):
        for when, found in (("before", before), ("after", after)):
            crossed = [str(found["crossed"][j]) if name == "library" else "" for j in jobs]
            size = found[name]
            cells = [f"{name}, {when}", f"{size['lines']:,}", str(size["files"]), *crossed]
            rows.append(f"| {' | '.join(cells)} |")
    for name, size in others["sizes"].items():
        first = str(others["crossed"]) if name == "torchdeq" else ""
        cells = [name, f"{size['lines']:,}", str(size["files"]), first, *[""] * (len(jobs) - 1)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, help="the revision to compare with")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", given.before], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        before = tree(Path(folder))
    after = tree(ROOT)
    others = {"sizes": peers(), "crossed": crossed("Anderson solve of torchdeq", [], "torchdeq")}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    record = {
        "command": f"python benchmarks/size.py --before {given.before}",
        "commit": commit,
        "before": before,
        "after": after,
        "peers": others,
    }
    (given.out / "size.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = table(before, after, others)
    (given.out / "size.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
