"""A small checkpoint that all tests of a session share."""

import pytest
from support.tiny_llama import llama, write_shards


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A sharded checkpoint with an index."""
    return write_shards(tmp_path_factory.mktemp("llama") / "tiny-llama", llama())
