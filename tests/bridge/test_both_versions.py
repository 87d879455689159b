"""Tests of te_cpu that go through Megatron, on Bridge's version of megatron-core: by themselves they run on NeMo's.

``tests/train/test_megatron_alone.py`` trains on both."""

from te_cpu.test_moe import test_megatrons_fused_path_is_its_plain_one  # noqa: F401
from train.test_hopper import (  # noqa: F401
    alone,
    test_grouped_experts_train_with_fp32_scales,
    test_megatron_trains_on_hoppers_layouts,
    test_mxfp8_is_refused,
)


def test_this_version_is_another_than_nemos():
    from megatron.core import __version__

    assert __version__ == "0.16.1"
