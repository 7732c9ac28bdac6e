"""Tests on a real GPU (`make test-gpu`). They need torch with CUDA, triton and pytest, and no build."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests if torch finds no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))
