"""The endpoint that the tests load."""

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("aiohttp") is None:
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def serving():
    """serving(first=0.1, ...) -> (its URL, the endpoint); stopped at the end of the test."""
    from contextlib import ExitStack

    from endpoint import Endpoint, running

    with ExitStack() as stack:

        def start(**how):
            endpoint = Endpoint(**how)
            return stack.enter_context(running(endpoint)), endpoint

        yield start
