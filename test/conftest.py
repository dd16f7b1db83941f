"""What all tests share: real data, which is beside the checkout in CI and may be absent elsewhere."""

import os

import pytest
from launch import SHARED


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data and models; skips where it is absent, except in CI, where it must be there."""
    if not SHARED.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"{SHARED} is absent in CI")
        pytest.skip(f"no real data at {SHARED}")
    return SHARED
