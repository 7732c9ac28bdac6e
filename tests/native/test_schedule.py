"""Schedules of the native plans on up to 64 threads: the real plans on a simulated clock (tests/native/schedule)."""

from pathlib import Path

import pytest

from benchmarks import schedule

pytestmark = [
    pytest.mark.slow,  # compiles the plans; `make test-core` runs the same program
    pytest.mark.skipif(schedule.compiler() is None, reason="no C++ compiler is here to build the plans with"),
]

# Least speedups on 8, 16 and 64 threads. The simulated clock is exact: a floor is the plans' speedup less a margin for
# changes of a kernel's cost.
FLOORS = {
    ("forward", "B1 N8 S1024"): (7.8, 14, 36),
    ("forward", "B1 N8 S2048"): (7.5, 14, 50),
    ("forward", "B1 N8 S2048 causal"): (7.8, 15.2, 44),
    ("forward", "B1 N64 S1024"): (7.8, 15.5, 62),
    ("forward", "B1 N8 S16384 window 256"): (7.8, 15.5, 45),
    ("forward", "packed 1800 + 64, N1"): (6, 9, 17),
    ("forward", "packed 1800 + 7 x 100, N8"): (7.5, 15, 46),
    ("forward", "packed mix of 100, N12"): (7.8, 15.5, 52),
    ("decode", "B1 Nkv8, 4096 keys"): (7.5, 14.5, 50),
    ("decode", "B8 Nkv8, 4096 keys"): (7.8, 15.5, 58),
    ("decode", "B64 Nkv8, 4096 keys"): (7.8, 15.5, 60),
    ("decode", "B8 MLA 128/1, 4096 keys"): (7.8, 15.5, 58),
    ("backward", "B1 N8 S1024"): (7.8, 15, 29),
    ("backward", "B1 N8 S2048 causal"): (7.8, 14, 33),
    ("backward", "B1 N32/8 S2048 causal"): (7.8, 14, 33),
    ("backward", "B4 N32 S2048 causal"): (7.8, 15.5, 62),
    ("backward", "packed 1800 + 7 x 100, N8"): (7.8, 14, 54),
    ("backward", "packed mix of 100, N12"): (7.8, 14.5, 45),
    ("backward", "B2 N8 S2048, bias [1,N,S,S]"): (7.8, 15.5, 60),
    ("backward", "B2 N8 S2048, bias [1,1,S,S]"): (7.8, 15.5, 59),
    ("backward", "B8 N32 S1024, bias [1,1,1,S]"): (3.7, 3.7, 3.2),
    ("backward", "B8 N32 S1024, bias [1,N,S,1]"): (7.8, 15.5, 31),
    ("backward", "B2 N32 S2048 causal, table"): (7.8, 15.5, 31),
    ("backward", "600, 3 and 600 rows, bias [1,1,S,S]"): (4, 7, 7),
    ("backward", "packed 512 x 16, N12"): (7.8, 15.5, 58),
    ("sparse", "4096 rows of 8192, top 512"): (7.8, 15.5, 58),
    ("sparse backward", "4096 rows of 8192, top 2048"): (7.8, 15.5, 58),
    ("sparse backward", "4096 rows of 8192, top 512"): (7.8, 15.5, 55),
    ("sparse backward", "B4, 1024 rows of 8192, top 512"): (7.8, 15.5, 55),
    ("indexer", "4096 rows and keys, top 2048"): (7.8, 15.5, 58),
    ("indexer", "200 rows of 4096 keys, top 2048"): (6.5, 13, 55),
    ("indexer decode", "B8, 1 row, 65536 keys, 64 heads"): (7.8, 15.5, 50),
    ("loss", "4096 rows and keys, top 2048"): (7.8, 15.5, 58),
    ("loss", "4096 rows and keys, all"): (7.5, 14, 14),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schedule.build(tmp_path_factory.mktemp("schedule"))


def speedup(program: Path, family: str, case: str, *threads: int) -> dict[int, float]:
    rows = schedule.run(program, family, case, *map(str, threads))
    return next(row.speedup for row in rows if (row.family, row.case) == (family, case))


@pytest.mark.parametrize(("family", "case"), FLOORS)
def test_simulated_speedup_on_8_to_64_threads_reaches_required_minimum(program: Path, family: str, case: str) -> None:
    result = speedup(program, family, case, 8, 16, 64)
    floors = dict(zip((8, 16, 64), FLOORS[family, case], strict=True))
    assert all(result[threads] >= floor for threads, floor in floors.items()), result


def test_simulated_speedup_agrees_with_sleeping_threads(program: Path, tmp_path: Path) -> None:
    sleeping = schedule.build(tmp_path, sleeps=True)
    for family, case in (("forward", "B1 N8 S1024 causal"), ("backward", "B1 N32/8 S2048 causal")):
        want = speedup(program, family, case, 2, 8)
        for _ in range(3):  # a busy machine wakes sleepers late
            got = speedup(sleeping, family, case, 2, 8)
            if all(got[threads] >= 0.9 * want[threads] for threads in (2, 8)):
                break
        for threads in (2, 8):
            assert 0.7 * want[threads] <= got[threads] <= 1.1 * want[threads], (family, got, want)
