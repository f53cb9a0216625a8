"""Runs with_sglang_engine.py where SGLang is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None,
                    reason="SGLang is not installed: `make sglang` brings it (11 GB)")
def test_inside_the_real_sglang():
    """In a process of its own, as test_evidence_sglang.py's, for the same reason."""
    tests = Path(__file__).with_name("with_sglang_engine.py")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-W", "ignore", tests],
                          capture_output=True, text=True, cwd=tests.parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
