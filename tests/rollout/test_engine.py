"""Real engines under the plugin: they load BF16 checkpoints, keep FP8 codes, and generate."""

import pytest
from rollout.engines import fp8, log_probs


@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama_tied", "qwen3_moe"])
def test_a_bf16_checkpoint_is_quantized_at_load(engine, checkpoint, kind):
    llm = engine(checkpoint(kind), **fp8())
    (layers,) = llm.collective_rpc("nemo_fp8_report")
    assert layers["model.layers.0.self_attn.qkv_proj"]["stored"] == "fp8"
    assert log_probs(llm).isfinite().all()
