"""Train a tiny GPT on NeMo's own classes, in one process or in several over gloo, and get its losses back.

    losses = train_tiny("bf16_mixed", steps=10, ranks=2, tp=2, sequence_parallel=True).losses

Each rank of each run is a process of its own: Megatron keeps its state in globals, and two runs in one process would
not be two runs. Importing NeMo takes many times longer than such a run, so the ranks are forked off one server that has
imported it; ``torchrun=True`` starts fresh interpreters under torchrun instead. Results cross as JSON. Whatever else a
test wants to know it collects in the ranks: ``before="module:function"`` names a function ``f(trainer, tiny)`` called
before training, and ``probe="module:function"`` one ``f(trainer, extra)`` called after it on every rank, and ``after``
one ``f(extra)`` called when the trainer is gone; ``extra`` of the last rank comes back.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support import ROOT, TESTS

# The server must not start threads (a fork would lose them), and two cores are shared by all ranks.
# How long the other ranks of a run may go on when one has ended with an error, in seconds.
GRACE = 10.0
# The first one: TransformerEngine resumes delayed scaling only where its user allows a pickle.
ENVIRONMENT = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
ENVIRONMENT |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHELASTIC_ERROR_FILE": "",
}


@dataclass
class Tiny:
    """Everything that makes a run: a precision, a layout, a model, what happens around it."""

    plugin: str = "bf16_mixed"
    """A precision factory: NeMo's own, or ours of that name if ``stock`` is False."""
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
    trainer: dict[str, Any] = field(default_factory=dict)
    folder: str | None = None
    """Where checkpoints go, and come from if there are any; None saves none."""
    save_every: int = 4
    reshardable: bool = False
    resume: str | None = None
    """A checkpoint that the run goes on from."""
    restore: str | None = None
    """A checkpoint whose weights alone the run starts from."""
    accelerator: str = "megatron_cpu"
    """``megatron_cpu`` is ours; ``cpu`` is Lightning's own, and leaves the rest to the plugin."""
    before: str | None = None
    probe: str | None = None
    after: str | None = None
    data: str | None = None
    """``module:function`` of a function that gives the data module, from this object."""


@dataclass
class Result:
    """What a run gives back: the last pipeline stage's losses, Megatron's loss scale after each step, what the probe
    found."""

    losses: list[float]
    loss_scales: list[float]
    extra: dict[str, Any]
    log: str


class RunFailed(AssertionError):
    """The run ended with an error, or not in time; the message ends with its log."""


def train_tiny(
    plugin: str = "bf16_mixed",
    *,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    torchrun: bool = False,
    **settings: Any,
) -> Result:
    """One run in processes of its own; see :class:`Tiny` for the settings."""
    tiny = Tiny(plugin=plugin, **settings)
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "result.json"), Path(folder, "log.txt")
        problem = (_under_torchrun if torchrun else _forked)(tiny, out, log, timeout, env or {})
        text = log.read_text(errors="replace")
        if problem or not out.exists():
            raise RunFailed(f"{problem or 'no result'}\n{text[-8000:]}")
        return Result(**json.loads(out.read_text()), log=text)


def _forked(tiny: Tiny, out: Path, log: Path, timeout: float, env: dict[str, str]) -> str | None:
    """Every rank forked off the server that has NeMo imported. Returns what went wrong, if anything."""
    from torch.distributed import TCPStore

    # Held by this process from the start, as torchrun's agent does: a free port that is only named may be another's by
    # the time that rank 0 listens on it.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["support.train.preload"])
    with _environment(ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}):
        ranks = [
            server.Process(target=_rank, args=(tiny, str(out), str(log), rank, str(store.port), env))
            for rank in range(tiny.ranks)
        ]
        for process in ranks:
            process.start()
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in ranks):
            failed = [process for process in ranks if process.exitcode]
            if failed:
                late = _outlive(ranks, GRACE)
                return f"a rank ended with exit code {failed[0].exitcode}" + (
                    "; others were still running" if late else ""
                )
            if time.monotonic() > deadline:
                return f"no end after {timeout} s"
            time.sleep(0.02)
        return next((f"a rank ended with exit code {p.exitcode}" for p in ranks if p.exitcode), None)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # with what it started: saving a checkpoint starts a process that outlives a rank
            process.kill()
            process.join()


def _outlive(ranks: list[Any], seconds: float) -> bool:
    """Let the other ranks say what they saw; whether any of them goes on for longer than that."""
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    return any(process.is_alive() for process in ranks)


def _rank(tiny: Tiny, out: str, log: str, rank: int, port: str, env: dict[str, str]) -> None:
    """One rank, in the environment that torchrun would give it, its output in the log."""
    os.setpgrp()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    world = str(tiny.ranks)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": "0",
    }
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tiny"} | env
    try:
        _worker(tiny, out)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # other ranks may never answer, and an ordinary exit would wait for them
    sys.stdout.flush()


def _under_torchrun(tiny: Tiny, out: Path, log: Path, timeout: float, env: dict[str, str]) -> str | None:
    """The same under torchrun, in a process group of its own, so that its children end with it."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={tiny.ranks}",
        "--no-python",
    ]
    command = [*launcher, sys.executable, __file__, json.dumps(asdict(tiny)), str(out)]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT | path | env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end after {timeout} s ({type(error).__name__})"
    return f"torchrun ended with exit code {code}" if code else None


@contextmanager
def _environment(variables: dict[str, str]) -> Any:
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


# ---------------------------------------------------------------------- in the worker


def tiny_trainer(plugin: Any, tiny: Tiny | None = None) -> tuple[Any, Any, Any, Any]:
    """The trainer, the model, the data and the optimizer of a run, from NeMo's own classes. ``plugin`` is a built
    plugin."""
    import torch
    from lightning.pytorch import seed_everything
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from nemo import lightning as nl

    from nemo_fp8.experiments.stories import StoryData
    from nemo_fp8.train.accelerator import MegatronCPU

    tiny = tiny or Tiny()
    # The only seed that NeMo's strategy heeds: its own is 1234, whatever one asks for.
    seed_everything(tiny.seed, verbose=False)
    data = (
        _named(tiny.data)(tiny)
        if tiny.data
        else StoryData(
            tiny.seq_length,
            tiny.micro_batch,
            tiny.global_batch,
            num_train_samples=100_000,
            num_val_samples=64,
            seed=tiny.seed,
        )
    )
    half = plugin.dtype_config.fp16
    params_dtype = torch.half if half else torch.bfloat16
    optimizer = {"optimizer": "adam", "lr": tiny.lr, "bf16": not half, "fp16": half, "params_dtype": params_dtype}
    ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "check_for_nan_in_grad": not half}
    strategy = {
        "tensor_model_parallel_size": tiny.tp,
        "pipeline_model_parallel_size": tiny.pp,
        "expert_model_parallel_size": tiny.ep,
        "sequence_parallel": tiny.sequence_parallel,
        "ddp": DistributedDataParallelConfig(**ddp | tiny.ddp),
        "ckpt_async_save": False,
        "ckpt_optim_fully_reshardable": tiny.reshardable,
    }
    settings = {
        "devices": tiny.ranks,
        "num_nodes": 1,
        "max_steps": tiny.steps,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": bool(tiny.folder or tiny.resume),
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
    }
    trainer = nl.Trainer(
        accelerator=MegatronCPU() if tiny.accelerator == "megatron_cpu" else tiny.accelerator,
        strategy=nl.MegatronStrategy(**strategy | tiny.strategy),
        plugins=plugin,
        **settings | tiny.trainer,
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
        "mixtral": (
            llm.MixtralConfig8x7B,
            llm.MixtralModel,
            {"num_query_groups": 2, "num_moe_experts": 4, "moe_router_topk": 2},
        ),
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


def _hear_writers_through_a_fork() -> None:
    """Megatron hears from the processes that write a checkpoint through one more, which it starts as a fresh
    interpreter. That imports torch for the first answer, and takes longer than the run."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert filesystem_async._results_queue is None
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


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
        _named(tiny.before)(trainer, tiny)
    if tiny.probe:

        class Probe(Callback):
            def on_train_end(self, trainer: Any, module: Any) -> None:
                _named(tiny.probe)(trainer, extra)

        trainer.callbacks.append(Probe())
    folder = tiny.folder or tempfile.mkdtemp()
    if tiny.folder:
        _hear_writers_through_a_fork()
    saves = {
        "every_n_train_steps": tiny.save_every,
        "save_last": True,
        "save_top_k": -1,
        "save_optim_on_train_end": True,
    }
    # NeMo resumes through its checkpoint callback, so there is one where nothing is to be saved, too.
    none = {"every_n_train_steps": 10**9, "save_last": False, "save_top_k": 0}
    ckpt = (
        nl.ModelCheckpoint(monitor="reduced_train_loss", filename="{step}", **saves if tiny.folder else none)
        if tiny.folder or tiny.resume
        else None
    )
    log = nl.NeMoLogger(
        log_dir=folder, name="tiny", use_datetime_version=False, version="run", ckpt=ckpt, update_logger_directory=False
    )
    start = nl.RestoreConfig(path=tiny.restore) if tiny.restore else None
    resume = nl.AutoResume(
        resume_from_path=tiny.resume,
        resume_if_exists=tiny.folder is not None,
        resume_ignore_no_checkpoint=True,
        restore_config=start,
    )
    llm.train(model=model, data=data, trainer=trainer, optim=optim, log=log, resume=resume)

    if tiny.after:
        _named(tiny.after)(extra)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank == world - 1:
        partial = Path(out + ".partial")
        partial.write_text(json.dumps({"losses": losses, "loss_scales": scales, "extra": extra}))
        partial.rename(out)


if __name__ == "__main__":
    _worker(Tiny(**json.loads(sys.argv[1])), sys.argv[2])
