"""Megatron-Bridge's own ``pretrain`` with a contract: a six-layer Llama learns to tell little stories, on any machine.

.venv-bridge/bin/python recipes/bridge_tiny.py bf16_with_mxfp8_mixed --steps 50
.venv-bridge/bin/python -m torch.distributed.run --nproc-per-node 2 recipes/bridge_tiny.py --monitor 10
"""

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "precision", nargs="?", default="bf16_with_fp8_blockwise_mixed", help="a preset, or a YAML file"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--monitor", type=int, default=0, metavar="N", help="measure FP8 in every layer each N steps")
    parser.add_argument("--save", help="the folder for the last checkpoint")
    given = parser.parse_args()

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from nemo_fp8.bridge import BridgeMonitor, require_start
    from nemo_fp8.experiments.on_bridge import tiny_llama

    config = tiny_llama(given.precision, steps=given.steps, folder=given.save)
    config.logger.log_interval = 1
    require_start(config)
    pretrain(config, forward_step, callbacks=[BridgeMonitor(given.monitor)] if given.monitor else None)


if __name__ == "__main__":  # Megatron writes checkpoints in processes that import this file again
    main()
