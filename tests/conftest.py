"""Fixtures shared by all tests: fresh random inputs that can be had again, and the GPU mark."""

from __future__ import annotations

import os
import secrets
import zlib

import numpy as np
import pytest
import torch

# Calls look at the values of their index arrays first.
os.environ.setdefault("MLA_KERNELS_CHECKED", "1")

#: One number behind all random inputs of a run. Every run draws another one, so that the
#: tests look at new inputs each time; the environment variable brings a run's inputs back.
SEED = int(os.environ.get("MLA_TEST_SEED") or secrets.randbelow(2**31))


def pytest_report_header(config: pytest.Config) -> str:
    return f"MLA_TEST_SEED={SEED}  (set it to get this run's random inputs again)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed. It depends on the run's seed and the test's name alone, so a test
    run by itself sees what it saw in the whole run."""
    # pytest shows captured output of a test that failed, and of no other.
    print(f"to repeat: MLA_TEST_SEED={SEED} python -m pytest '{request.node.nodeid}'")
    return zlib.crc32(f"{SEED}:{request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A CPU generator, for ``torch.randn(..., generator=generator)``."""
    return torch.Generator().manual_seed(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
