"""``nemo_fp8.autocast`` over modules of TransformerEngine: threads that are in one region at a time."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch
import transformer_engine.pytorch as te

import nemo_fp8

TENSORWISE = nemo_fp8.preset("bf16_with_fp8_tensorwise_mixed").replace(first_layers=0, last_layers=0)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16)


@pytest.mark.parametrize("of_module", [True, False], ids=["model", "no model"])
def test_the_last_thread_that_leaves_takes_te_along(module, of_module, in_thread):
    """The second one put back what it had found, so that TE computed in FP8 from then on; and where the first one
    left, TE computed in BF16 for the second."""
    x = torch.randn(32, 64).bfloat16()
    fp8 = nemo_fp8.autocast(TENSORWISE, module if of_module else None)
    with torch.no_grad():
        plain = module(x)
        with fp8:
            expected = module(x)
            with nemo_fp8.autocast("bf16_mixed", module if of_module else None):
                assert torch.equal(module(x), plain)
                with fp8:
                    assert torch.equal(module(x), expected)
    assert not torch.equal(plain, expected)

    first, second = in_thread(), in_thread()
    for thread in (first, second):
        thread(fp8.__enter__)
    first(fp8.__exit__, None, None, None)
    assert torch.equal(second(module, x), expected)
    second(fp8.__exit__, None, None, None)
    assert torch.equal(module(x), plain)


def test_a_region_that_te_refuses_counts_for_none(module, monkeypatch):
    """TE may say no when its autocast is entered, such as for a GPU that is too old."""
    fp8, x = nemo_fp8.autocast(TENSORWISE, module), torch.randn(32, 64).bfloat16()
    with torch.no_grad(), fp8:
        expected = module(x)
    with monkeypatch.context() as old:
        old.setattr(te, "autocast", _Refuses)
        with pytest.raises(RuntimeError, match="cannot"):
            fp8.__enter__()
    with torch.no_grad(), fp8:
        assert torch.equal(module(x), expected)


class _Refuses(AbstractContextManager):
    def __init__(self, **arguments):
        pass

    def __enter__(self):
        raise RuntimeError("this GPU cannot")

    def __exit__(self, *error):
        pass


@pytest.fixture
def in_thread():
    """Start threads; each runs one call after another, and returns what that returned."""
    with ExitStack() as stack:

        def start():
            thread = stack.enter_context(ThreadPoolExecutor(1))
            return lambda call, *args: thread.submit(torch.no_grad()(call), *args).result(30)

        yield start
