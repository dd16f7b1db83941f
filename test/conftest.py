"""What all tests share: real data, which is beside the checkout in CI and may be absent elsewhere."""

import os

import pytest
from launch import SHARED

from trainer import limits


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data and models; skips where it is absent, except in CI, where it must be there."""
    if not SHARED.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"{SHARED} is absent in CI")
        pytest.skip(f"no real data at {SHARED}")
    return SHARED


@pytest.fixture(scope="module")
def world():
    """A process group of this process alone, for functions that communicate."""
    import torch.distributed as dist  # not at the top: most tests start without torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def own_limits(monkeypatch):
    """--limits of one test are not those of the next one in this process."""
    monkeypatch.setattr(limits, "_raised", dict(limits._raised))
