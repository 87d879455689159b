"""The two trainings of a run, each a plain NeMo run: demonstrations make the base model, GRPO makes the policy.

    llm.train(model, data, trainer, log, resume, optim)

GRPO is a run whose data is made while it runs: the callback :class:`~nemo_fp8.experiments.rl.loop.GrpoLoop` fills the
data module before each step. So precision plugin, parallelism, distributed optimizer, checkpoints and resume are those
of any other NeMo run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

from nemo_fp8 import te_cpu
from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.experiments.rl.data import DemonstrationData, ExperienceData
from nemo_fp8.experiments.rl.grpo import GrpoLoss
from nemo_fp8.experiments.rl.policy import GrpoLlama
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.train.accelerator import MegatronCPU
from nemo_fp8.train.checkpoints import Resume, newest_usable
from nemo_fp8.train.megatron_cpu import NO_FUSIONS
from nemo_fp8.train.plugin import MixedPrecision, plugin_arguments


def base_checkpoint(s: GrpoSettings) -> Path | None:
    """Return the base model's checkpoint; None if there is none."""
    found = newest_usable(_checkpoints(s.base))
    return found.folder if found and found.step() == s.base_steps else None


def fit_base(s: GrpoSettings) -> Path:
    """Train the base model on demonstrations, in one process, and return its checkpoint."""
    data = DemonstrationData(s.digits, s.seq_length, s.base_batch, s.base_steps, s.seed)
    trainer = _trainer(s, preset("bf16_mixed"), s.base_steps, [], ranks=1, tensor_parallel=1)
    model = llm.LlamaModel(_model_config(s), tokenizer=data.tokenizer)
    _train(s, s.base, model, data, trainer, s.base_lr, s.base_steps, None)
    found = base_checkpoint(s)
    assert found is not None, "the run has come to its end"
    return found


def fit_policy(s: GrpoSettings, base: Path, loop: Callback) -> None:
    """Train the policy from the base model, or resume from the last step in this folder."""
    data = ExperienceData.of(s)
    trainer = _trainer(s, s.precision, s.steps, [loop], ranks=s.ranks, tensor_parallel=s.tensor_parallel)
    model = GrpoLlama(_model_config(s), tokenizer=data.tokenizer)
    model.grpo_loss = GrpoLoss(clip_low=s.clip_low, clip_high=s.clip_high, kl_beta=s.kl_beta)
    _train(s, s.folder, model, data, trainer, s.lr, s.save_every, nl.RestoreConfig(path=str(base)))


def _checkpoints(folder: str) -> Path:
    return Path(folder, "nemo", "run", "checkpoints")


def _train(
    s: GrpoSettings, folder: str, model: Any, data: Any, trainer: Any, lr: float, save_every: int, start: Any
) -> None:
    # Keep the newest two: one may be incomplete when a run is killed.
    ckpt = nl.ModelCheckpoint(
        monitor="global_step",
        mode="max",
        save_top_k=2,
        save_last=False,
        every_n_train_steps=save_every,
        save_optim_on_train_end=True,
        filename="{step}",
    )
    log = nl.NeMoLogger(
        log_dir=folder,
        name="nemo",
        use_datetime_version=False,
        version="run",
        ckpt=ckpt,
        tensorboard=None,
        update_logger_directory=False,
    )
    resume = Resume(resume_if_exists=True, resume_ignore_no_checkpoint=True, resume_past_end=True, restore_config=start)
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        weight_decay=0.0,
    )
    llm.train(model, data, trainer, log, resume, nl.MegatronOptimizerModule(optimizer))


def _trainer(
    s: GrpoSettings,
    precision: Precision,
    steps: int,
    callbacks: Sequence[Callback],
    *,
    ranks: int,
    tensor_parallel: int,
) -> Any:
    gpu = te_cpu.has_gpu()
    seed_everything(s.seed, verbose=False)
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        seed=s.seed,
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=True
        ),
        ckpt_async_save=False,
        ckpt_optim_fully_reshardable=True,
    )
    return nl.Trainer(
        accelerator="gpu" if gpu else MegatronCPU(),
        devices=1,  # each rank has a node of its own: see TrainerRank
        num_nodes=ranks,
        strategy=strategy,
        plugins=MixedPrecision(**plugin_arguments(precision)),
        callbacks=list(callbacks),
        max_steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def _model_config(s: GrpoSettings) -> llm.LlamaConfig:
    size = s.policy
    return llm.LlamaConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_attention_heads=size.heads,
        num_query_groups=size.kv_heads,
        kv_channels=size.head_dim,
        seq_length=s.seq_length,
        rotary_base=size.rope_base,
        layernorm_epsilon=size.norm_eps,
        init_method_std=size.hidden**-0.5,
        make_vocab_size_divisible_by=128,
        use_cpu_initialization=True,
        **{} if te_cpu.has_gpu() else NO_FUSIONS,
    )
