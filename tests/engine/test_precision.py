"""TF32 is asked for by either of torch's two ways to set it; a process each: settings last.

The processes are forks of one that has imported torch, which is most of the work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

_ASK = """
import json, os, sys, torch
from equilibria import Picard
from equilibria.engine.transforms import convolutions_take_tf32, products_take_tf32

def ask():
    own, usual = (Picard().relative_tolerance(torch.float32, kind) for kind in ("cuda", "cpu"))
    return [convolutions_take_tf32(), products_take_tf32(), own > usual]

for setting in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(setting)
        print(json.dumps([setting, ask()]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        raise SystemExit(f"{setting!r} failed")
"""

# What is set → (convolutions, products).
SETTINGS = {
    "pass": (True, False),
    "torch.backends.cudnn.allow_tf32 = False": (False, False),
    "torch.backends.cudnn.allow_tf32 = False; torch.backends.cuda.matmul.allow_tf32 = True": (
        False,
        True,
    ),
    "torch.set_float32_matmul_precision('high')": (True, True),
    "torch.backends.fp32_precision = 'ieee'": (False, False),
    "torch.backends.fp32_precision = 'tf32'": (True, True),
}


@pytest.fixture(scope="module")
def answers() -> Any:
    if not hasattr(os, "fork"):
        pytest.skip("forks of POSIX")
    command = [sys.executable, "-c", _ASK, json.dumps(list(SETTINGS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_ways_to_set_tf32(setting: str, answers: Any) -> None:
    convolutions, products = SETTINGS[setting]
    assert answers[setting] == [convolutions, products, convolutions or products]
