"""What runs inside vLLM has moved too; these old names import where vLLM is."""

import pytest
from house import test_moved

ROWS = [row for row in test_moved.MOVED.items() if row[1].startswith(test_moved.IN_VLLM)]


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_an_old_name_is_the_new_module(old, new):
    test_moved.test_an_old_name_is_the_new_module(old, new)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_public_name_of_the_last_release_is_found():
    lost, elsewhere = test_moved.lost_of_the_last_release()
    assert lost == []
    assert not any(name.startswith("nemo_fp8.rollout") for name in elsewhere)
