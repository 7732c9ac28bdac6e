"""A pytest plugin with the option --fake-npu, by which tests for Ascend's chips (torch_npu) run on this library.

It imports nothing else of the library unless the option is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option --fake-npu to pytest's `parser`."""
    parser.addoption(
        "--fake-npu",
        action="store_true",
        help="Run tests for Ascend's chips on a machine without one: fusion_attention takes torch_npu's place.",
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Installs the substitute of torch_npu before conftests are read, if the option is given in `early_config`."""
    if early_config.known_args_namespace.fake_npu:
        from fusion_attention.npu import pytest as plugin

        early_config.pluginmanager.register(plugin, plugin.NAME)
        plugin.pytest_load_initial_conftests(early_config)
