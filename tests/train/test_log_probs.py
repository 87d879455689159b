"""The trainer's log-probs are those of its weights as they are now: FP8 that is kept for a global batch is made
again."""

from support.train.harness import train_tiny


def test_log_probs_are_of_the_weights_that_are_there():
    found = train_tiny(
        "bf16_with_fp8_subchannel_scaling_mixed",
        settings={"fp8_param_gather": False},
        stock=False,
        model="llama",
        config={"hidden_size": 256, "ffn_hidden_size": 512},
        steps=1,
        probe="support.train.log_probs_probe:before_and_after",
    ).extra
    assert found["kept"] > 0
    assert found["moved"] > 0.1
    assert found["stale"] == 0
