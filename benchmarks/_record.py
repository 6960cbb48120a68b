"""What a benchmark writes: numbers in a JSON file that says by which command and commit."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from equilibria.engine import write_text


def parser(text: str | None, out: str = "results") -> argparse.ArgumentParser:
    """A parser with ``--out``; ``text`` is the script's docstring."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path(out), help="folder of the result")
    return made


def commit() -> str:
    """The checkout's, or nothing where there is no git."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip()


def write(path: Path, record: dict[str, Any]) -> None:
    """The record as it is, in one step."""
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def save(script: str, out: Path, **found: Any) -> None:
    """Write ``found`` to the folder as ``<script>.json`` and print it."""
    record = {
        "command": f"python benchmarks/{script}.py",
        "commit": commit(),
        "torch": torch.__version__,
        **found,
    }
    write(out / f"{script}.json", record)
    sys.stdout.write(f"{json.dumps(record, indent=1, ensure_ascii=False)}\n")
