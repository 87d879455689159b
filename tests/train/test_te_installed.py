"""Where TransformerEngine is installed and FP8 is emulated all the same: nothing of TE's may compute in BF16 in silence.

TE itself does not install here. What is asked is what Megatron and NeMo would do: which layers NeMo takes, and which model is refused.
"""

import pytest
import torch

from nemo_fp8 import PrecisionError
from nemo_fp8.train.engine import require_emulated
from nemo_fp8.train.measure import _parts

pytestmark = pytest.mark.train


def test_the_emulation_takes_megatrons_own_layers(monkeypatch):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import SequentialMLP
    from nemo.collections.llm.gpt.model import base

    from nemo_fp8.train.emulated import Fp8ColumnParallelLinear, emulated_fp8

    monkeypatch.setattr(base, "HAVE_TE", True)
    with emulated_fp8():
        assert base.HAVE_TE is False
        experts, parts = LocalSpecProvider().grouped_mlp_modules(True, False)
        assert (experts, parts.linear_fc1) == (SequentialMLP, Fp8ColumnParallelLinear)
    assert base.HAVE_TE is True


def test_a_model_with_linears_of_te_is_refused():
    theirs = type("TEColumnParallelLinear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    norm = type("RMSNorm", (torch.nn.LayerNorm,), {"__module__": "transformer_engine.pytorch.module.rmsnorm"})
    require_emulated(torch.nn.Sequential(torch.nn.Linear(8, 8), norm(8)))
    with pytest.raises(PrecisionError, match=r"and 1 is TransformerEngine's"):
        require_emulated([torch.nn.Sequential(torch.nn.Linear(8, 8), theirs(8, 8))])


@pytest.mark.parametrize(("dtype", "scales", "padded"), [(torch.float32, (2, 3), (2, 4)), (torch.uint8, (256, 10), (256, 12))])
def test_padding_of_te_scales_is_not_measured(dtype, scales, padded):
    """TE pads the scales of blocks to what its kernels read, with bytes that nobody wrote."""

    class Weight:
        shape = torch.Size((256, 320))
        _rowwise_data = torch.zeros(256, 320, dtype=torch.uint8)
        _rowwise_scale_inv = torch.full(padded, 255 if dtype == torch.uint8 else torch.inf, dtype=torch.float32).to(dtype)

        def numel(self):
            return 256 * 320

        def dequantize(self, dtype):
            return torch.zeros(256, 320, dtype=dtype)

    weight = Weight()
    weight._rowwise_scale_inv[: scales[0], : scales[1]] = 127 if dtype == torch.uint8 else 1.0
    _, found, _ = _parts(weight)
    assert found.shape == scales
    assert bool((found == 1).all())
