"""OneStep: the contract with M = I."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import AdjointContract


class TestOneStep(AdjointContract):
    def make_adjoint(self) -> Any:
        return eq.OneStep()

    def propagator(self, jacobian: Tensor) -> Tensor:
        return torch.eye(len(jacobian), dtype=jacobian.dtype)
