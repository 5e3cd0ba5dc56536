"""What all tests share: one thread a rank, a fixed seed, and honest reasons for skips.

Property tests take the same examples every time, so that a commit is either green or not.
To search for new ones: `pytest --hypothesis-profile=default`.
"""

import os
import sys
import time

# Before torch is loaded: bits are compared, and they are equal with one intra-op thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")


@pytest.fixture(autouse=True)
def _same_start(monkeypatch):
    """Start every test from the same random numbers, in the world that the test itself names.

    ZEROLAB_WORLD chooses the world of the notebooks, which do not come through here.
    """
    monkeypatch.delenv("ZEROLAB_WORLD", raising=False)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))


def pytest_terminal_summary(terminalreporter):
    """Add the time of the whole `make test`, which began before pytest."""
    started = os.environ.get("ZEROLAB_TEST_STARTED")
    if started is not None:
        minutes, seconds = divmod(round(time.time() - float(started)), 60)
        terminalreporter.write_line(f"The whole test took {minutes} min {seconds:02d} s.")
