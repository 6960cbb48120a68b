"""TF32 is asked for by either of torch's two ways to set it; a process each: settings last."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ASK = """
import torch
from equilibria import Picard
from equilibria.engine.precision import convolutions_take_tf32, products_take_tf32

{setting}
print(convolutions_take_tf32(), products_take_tf32())
own, usual = (Picard().relative_tolerance(torch.float32, kind) for kind in ("cuda", "cpu"))
print(own > usual)
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


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_ways_to_set_tf32(setting: str) -> None:
    code = _ASK.format(setting=setting)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    convolutions, products = SETTINGS[setting]
    assert found.stdout.split() == [str(convolutions), str(products), str(convolutions or products)]
