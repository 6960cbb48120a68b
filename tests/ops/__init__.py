"""Kernels in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def on_gpu(test: Any) -> Any:
    """Mark a test that needs CUDA."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(skip(test))


def run_interpreted(script: str, given: Any = None) -> Any:
    """What the script prints as JSON, in a process of its own: Triton chooses its interpreter when
    it is first imported."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=json.dumps(given),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
