"""A Llama that is small enough for a laptop, and large enough that every FP8 recipe makes a difference.

It has six layers, so that recipes which keep two layers at either end in BF16 still run two in FP8, and sizes that are
multiples of 128, so that the blocks of every format are whole, on one tensor-parallel rank or two. It reads the stories
of :mod:`nemo_fp8.experiments.stories`, one byte a token, and trains on two ranks with Megatron's distributed optimizer:
over gloo on a CPU, over NCCL on GPUs.
"""

from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

import nemo_run as run
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.recipes.log.default import default_log, default_resume, tensorboard_logger
from nemo.collections.llm.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo.utils.exp_manager import TimingCallback

from nemo_fp8 import te_cpu
from nemo_fp8.experiments.stories import ByteTokenizer, StoryData
from nemo_fp8.recipes.precision import Folder, PrecisionLike, plugin_of
from nemo_fp8.train.accelerator import MegatronCPU
from nemo_fp8.train.megatron_cpu import NO_FUSIONS


def tiny_llama(
    precision: PrecisionLike = "bf16_with_fp8_blockwise_mixed",
    dir: Folder = None,
    name: str = "tiny_llama",
    ranks: int = 2,
    steps: int = 300,
    seed: int = 1234,
) -> run.Partial[Any]:
    """Return the recipe that trains a six-layer Llama of 5 million parameters to tell little stories.

    It runs on ``ranks`` processes for ``steps`` steps; ``dir`` and ``name`` say where its checkpoints and logs lie, as
    in NeMo's recipes. Raises PrecisionError if there is no such precision.
    """
    gpu = te_cpu.has_gpu()
    seq_length = 128
    model = run.Config(
        llm.LlamaConfig,
        num_layers=6,
        hidden_size=256,
        ffn_hidden_size=768,
        num_attention_heads=4,
        num_query_groups=2,
        seq_length=seq_length,
        make_vocab_size_divisible_by=128,
        # The same weights whatever the layout: a tensor-parallel rank cuts its shard out of the whole.
        use_cpu_initialization=True,
        **{} if gpu else NO_FUSIONS,
    )
    strategy = run.Config(
        nl.MegatronStrategy,
        seed=seed,
        ckpt_async_save=False,
        ddp=run.Config(DistributedDataParallelConfig, grad_reduce_in_fp32=True, check_for_nan_in_grad=True),
    )
    trainer = run.Config(
        nl.Trainer,
        accelerator="gpu" if gpu else run.Config(MegatronCPU),
        devices=ranks,
        num_nodes=1,
        max_steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        use_distributed_sampler=False,
        # NeMo's printer gathers Megatron's timers on rank 0 only: harmless over NCCL, a deadlock over gloo.
        enable_progress_bar=gpu,
        strategy=strategy,
        plugins=plugin_of(precision),
        callbacks=[run.Config(TimingCallback)],
    )
    return run.Partial(
        llm.pretrain,
        model=run.Config(llm.LlamaModel, config=model, tokenizer=run.Config(ByteTokenizer)),
        data=run.Config(StoryData, seq_length=seq_length, micro_batch_size=4, global_batch_size=8, seed=seed),
        trainer=trainer,
        log=default_log(dir=dir, name=name, tensorboard_logger=tensorboard_logger(name=name)),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=1e-3, warmup_steps=20),
        resume=default_resume(),
    )


# A call and not a decorator: nemo-run is untyped, so a decorated function would have no type.
run.cli.factory(target=llm.pretrain, name="tiny_llama")(tiny_llama)
