"""Checks that run together in one set of real processes: a module lists them in `CHECKS`, by number of ranks."""

import pytest

from tests.support.distributed import run_checks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check_name" in metafunc.fixturenames:
        names = [check.__name__ for checks in metafunc.module.CHECKS.values() for check in checks]
        metafunc.parametrize("check_name", names)


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    return {
        name: found
        for size, checks in request.module.CHECKS.items()
        for name, found in run_checks(size, checks).items()
    }
