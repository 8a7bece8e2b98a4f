"""What every test shares: where kernels run, and fresh random numbers whose seed is printed when a test fails."""

import os
import secrets

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported: before anything of ours is

    from bench import interpreter

    interpreter.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="random seed of every test; drawn anew for each by default")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch and says with what; pytest shows it beside a failure."""
    given = request.config.getoption("--seed")
    value = secrets.randbelow(2**31) if given is None else given
    print(f"random seed: {value} (repeat with --seed {value})")
    torch.manual_seed(value)
    return value


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU where there is one, else the CPU, interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
