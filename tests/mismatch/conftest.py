"""One thread: the matrices are tiny, and two threads that wait for each other on a busy machine are slower by far."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
