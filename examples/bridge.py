"""Megatron-Bridge: five steps of its own `pretrain` under an FP8 contract, on a CPU or a GPU.

    .venv-bridge/bin/python examples/bridge.py

You see the loss of every step, how many of the 24 linears ran in FP8, of which the contract keeps two in BF16, and the
linears whose operands lost most in it.
"""

from nemo_fp8 import preset

PRECISION = preset("bf16_with_fp8_blockwise_mixed").replace(keep=("*.layers.0.mlp.*",))


def main() -> None:
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from nemo_fp8.bridge import BridgeMonitor, bridge_config
    from nemo_fp8.experiments.on_bridge import mean_loss, tiny_llama

    config = tiny_llama(steps=5)  # a ConfigContainer like any other
    config.mixed_precision = bridge_config(PRECISION)

    losses, monitor, callbacks = [], BridgeMonitor(every_n_steps=5), CallbackManager()
    callbacks.add(monitor)
    callbacks.register("on_train_step_end", lambda context: losses.append(mean_loss(context)))
    pretrain(config, forward_step, callbacks=callbacks)

    print("\nlosses:", *(f"{loss:.3f}" for loss in losses))
    print("linears in FP8:", len({row["layer"] for row in monitor.rows}))
    for row in sorted(monitor.rows, key=lambda row: row["snr_db"])[:3]:
        print(f"{row['layer']}, {row['operand']}: {row['snr_db']:.1f} dB")


if __name__ == "__main__":  # Megatron writes checkpoints in processes that import this file again
    main()
