"""Mixtures of experts on a CPU."""

from __future__ import annotations

import pytest
import torch

from contract.mixtures import Experts, MixtureNumbers


class TestExperts(Experts):
    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")


class TestMixture(MixtureNumbers):
    pass
