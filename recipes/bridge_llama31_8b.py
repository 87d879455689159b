"""Llama 3.1 8B from a Hugging Face checkpoint in Megatron-Bridge, in FP8, on one node of eight H100 or newer.

    torchrun --nproc-per-node 8 recipes/bridge_llama31_8b.py meta-llama/Llama-3.1-8B bf16_with_fp8_blockwise_mixed

Built and checked by the tests; not run here, where no GPU is.
"""

import sys
from typing import Any

from megatron.bridge.training import config as c

from nemo_fp8.bridge import BridgeMonitor, bridge_config, require_start

LENGTH = 8192


def llama31_8b(model: Any, precision: str = "bf16_with_fp8_blockwise_mixed", steps: int = 1000) -> c.ConfigContainer:
    """Return the run of a provider. Mock data: put ``GPTDatasetConfig(blend=...)`` and a tokenizer in their place."""
    model.seq_length = LENGTH
    model.tensor_model_parallel_size, model.sequence_parallel = 2, True
    return c.ConfigContainer(
        model=model,
        mixed_precision=bridge_config(precision),
        train=c.TrainingConfig(train_iters=steps, micro_batch_size=1, global_batch_size=128, eval_iters=0),
        optimizer=c.OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            min_lr=1e-6,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=steps // 20,
            lr_decay_iters=steps,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        ddp=c.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        dataset=c.MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
        ),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1),
        logger=c.LoggerConfig(log_interval=10),
        checkpoint=c.CheckpointConfig(save="llama31_8b", save_interval=200, ckpt_format="torch_dist"),
        rng=c.RNGConfig(seed=1234),
    )


def main() -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    checkpoint, *precision = sys.argv[1:]
    provider = AutoBridge.from_hf_pretrained(checkpoint).to_megatron_provider()
    config = llama31_8b(provider, *precision)
    require_start(config)
    pretrain(config, forward_step, callbacks=[BridgeMonitor(every_n_steps=100)])


if __name__ == "__main__":
    main()
