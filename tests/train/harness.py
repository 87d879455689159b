"""Train a tiny GPT on NeMo's own classes, in one process or in several over gloo, and get its losses back.

    losses = train_tiny("bf16_mixed", steps=10, ranks=2, tp=2, sequence_parallel=True).losses

Each run is a fresh interpreter under torchrun: Megatron keeps its state in globals, and so two runs in one process would
not be two runs. The run's settings and results cross as JSON; whatever else a test wants to know about a run it collects in
the worker, by a probe: ``probe="module:function"`` names a function ``f(trainer, result)`` called after training, and
``before="module:function"`` one ``f(trainer)`` called before it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Tiny:
    """Everything that makes a run: a precision, a layout, a model, what happens around it."""

    plugin: str = "bf16_mixed"
    """A preset (through our plugin's class if ``stock`` is False, else NeMo's own factory of that name)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the plugin, over those of the preset, in NeMo's names."""
    stock: bool = True
    steps: int = 8
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    model: str = "gpt"
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config."""
    ddp: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    seq_length: int = 64
    micro_batch: int = 2
    global_batch: int = 8
    seed: int = 1234
    folder: str | None = None
    """Where checkpoints go; None saves none."""
    save_every: int = 4
    reshardable: bool = False
    restore: str | None = None
    """A checkpoint whose weights (not its optimizer) the run starts from."""
    before: str | None = None
    probe: str | None = None
    data: str | None = None
    """``module:function`` of a function that gives the data module, from this object."""


@dataclass
class Result:
    """What a run gives back: the last pipeline stage's losses, Megatron's loss scale after each step, what the probe found."""

    losses: list[float]
    loss_scales: list[float]
    extra: dict[str, Any]
    log: str


class RunFailed(AssertionError):
    """The run ended with an error; the message is its log."""


def train_tiny(plugin: str = "bf16_mixed", *, timeout: float = 240, env: dict[str, str] | None = None, **settings: Any) -> Result:
    """One run in fresh processes; see :class:`Tiny` for the settings."""
    tiny = Tiny(plugin=plugin, **settings)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tiny.ranks}", "--no-python"]
        command = [*launcher, sys.executable, __file__, json.dumps(asdict(tiny)), str(out)]
        log = run_in_group(command, timeout, env or {})
        if not out.exists():
            raise RunFailed(log)
        return Result(**json.loads(out.read_text()), log=log)


def run_in_group(command: list[str], timeout: float, env: dict[str, str]) -> str:
    """Run a command in a process group of its own, so that on a timeout its children end with it. Returns its output."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "TORCHELASTIC_ERROR_FILE": "", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **fixed, **env}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, text=True
        )
        try:
            process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            raise RunFailed(f"no end after {timeout} s\n{output.read()[-6000:]}") from None
        output.seek(0)
        return output.read()


# ---------------------------------------------------------------------- in the worker


def tiny_trainer(plugin: Any, tiny: Tiny | None = None) -> tuple[Any, Any, Any, Any]:
    """The trainer, the model, the data and the optimizer of a run, from NeMo's own classes. ``plugin`` is a built plugin."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from nemo import lightning as nl

    from nemo_fp8.train.accelerator import MegatronCPU
    from nemo_fp8.train.data import StoryData

    tiny = tiny or Tiny()
    data = (
        _named(tiny.data)(tiny)
        if tiny.data
        else StoryData(tiny.seq_length, tiny.micro_batch, tiny.global_batch, num_train_samples=100_000, num_val_samples=64)
    )
    half = plugin.dtype_config.fp16
    params_dtype = torch.half if half else torch.bfloat16
    optimizer = {"optimizer": "adam", "lr": tiny.lr, "bf16": not half, "fp16": half, "params_dtype": params_dtype}
    ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "check_for_nan_in_grad": not half}
    trainer = nl.Trainer(
        accelerator=MegatronCPU(),
        devices=tiny.ranks,
        num_nodes=1,
        max_steps=tiny.steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=tiny.folder is not None,
        enable_progress_bar=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        strategy=nl.MegatronStrategy(
            tensor_model_parallel_size=tiny.tp,
            pipeline_model_parallel_size=tiny.pp,
            expert_model_parallel_size=tiny.ep,
            sequence_parallel=tiny.sequence_parallel,
            ddp=DistributedDataParallelConfig(**ddp | tiny.ddp),
            seed=tiny.seed,
            ckpt_async_save=False,
            ckpt_optim_fully_reshardable=tiny.reshardable,
            **tiny.strategy,
        ),
        plugins=plugin,
    )
    optim = nl.MegatronOptimizerModule(OptimizerConfig(**optimizer | {"use_distributed_optimizer": True} | tiny.optim))
    return trainer, _model(tiny, data.tokenizer), data, optim


_CONFIG = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "make_vocab_size_divisible_by": 128,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    # Every layout starts from the same weights only if each of them cuts its shards out of the same whole.
    "use_cpu_initialization": True,
}


def _model(tiny: Tiny, tokenizer: Any) -> Any:
    from nemo.collections import llm

    configs = {
        "gpt": (llm.GPTConfig, llm.GPTModel, {}),
        "llama": (llm.LlamaConfig, llm.LlamaModel, {"num_query_groups": 2}),
        "qwen": (llm.Qwen3Config8B, llm.Qwen3Model, {"num_query_groups": 2, "kv_channels": 32, "vocab_size": None}),
        "mixtral": (llm.MixtralConfig8x7B, llm.MixtralModel, {"num_query_groups": 2, "num_moe_experts": 4, "moe_router_topk": 2}),
    }
    config, model, own = configs[tiny.model]
    return model(config(**_CONFIG | own | {"seq_length": tiny.seq_length} | tiny.config), tokenizer=tokenizer)


def _plugin(tiny: Tiny) -> Any:
    import fiddle as fdl

    if tiny.stock:
        from nemo.collections.llm.recipes.precision import mixed_precision
    else:
        from nemo_fp8 import factories as mixed_precision
    config = getattr(mixed_precision, tiny.plugin)()
    for name, value in tiny.settings.items():
        setattr(config, name, value)
    return fdl.build(config)


def _named(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _worker(tiny: Tiny, out: str) -> None:
    import torch
    from lightning.pytorch.callbacks import Callback
    from nemo import lightning as nl
    from nemo.collections import llm

    torch.set_num_threads(1)
    losses: list[float] = []
    scales: list[float] = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["reduced_train_loss"]))
            optimizer = trainer.strategy.optimizers[0].mcore_optimizer
            scales.append(float(getattr(optimizer, "chained_optimizers", [optimizer])[0].get_loss_scale()))

    trainer, model, data, optim = tiny_trainer(_plugin(tiny), tiny)
    trainer.callbacks.append(Record())
    extra: dict[str, Any] = {}
    if tiny.before:
        _named(tiny.before)(trainer)
    if tiny.probe:

        class Probe(Callback):
            def on_train_end(self, trainer: Any, module: Any) -> None:
                _named(tiny.probe)(trainer, extra)

        trainer.callbacks.append(Probe())
    folder = tiny.folder or tempfile.mkdtemp()
    ckpt = (
        nl.ModelCheckpoint(
            every_n_train_steps=tiny.save_every,
            save_last=True,
            save_top_k=-1,
            monitor="reduced_train_loss",
            save_optim_on_train_end=True,
            filename="{step}",
        )
        if tiny.folder
        else None
    )
    log = nl.NeMoLogger(log_dir=folder, name="tiny", use_datetime_version=False, version="run", ckpt=ckpt, update_logger_directory=False)
    resume = None
    if tiny.folder:
        start = nl.RestoreConfig(path=tiny.restore) if tiny.restore else None
        resume = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True, restore_config=start)
    llm.train(model=model, data=data, trainer=trainer, optim=optim, log=log, resume=resume)

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank == world - 1:
        partial = Path(out + ".partial")
        partial.write_text(json.dumps({"losses": losses, "loss_scales": scales, "extra": extra}))
        partial.rename(out)


if __name__ == "__main__":
    _worker(Tiny(**json.loads(sys.argv[1])), sys.argv[2])
