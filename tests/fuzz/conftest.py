"""Options: --calls N is the number of calls, --seed S the number of the first call (default: random)."""

import secrets

import pytest

CALLS = 2000
_RUNS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostile")
    group.addoption("--calls", type=int, default=CALLS, help="hostile: calls of a family in the slow tests")
    group.addoption("--seed", type=int, default=None, help="hostile: number of the first call")
    group.addoption("--describe", action="store_true", help="hostile: print every call")


@pytest.fixture(scope="session")
def calls(pytestconfig: pytest.Config) -> range:
    """Returns the numbers of a run's calls; pytest lacks these options if it runs other folders too."""
    seed = pytestconfig.getoption("--seed", None)
    first = secrets.randbelow(10**9) if seed is None else seed
    return range(first, first + int(pytestconfig.getoption("--calls", CALLS)))


@pytest.fixture
def noted(pytestconfig: pytest.Config) -> list[str]:
    """Returns the list of lines that the summary prints."""
    return pytestconfig.stash.setdefault(_RUNS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_RUNS, []):
        terminalreporter.write_line(line)
