"""Runs of Megatron-Bridge's ``pretrain``, one after the other in one process or in two, and what was seen of them.

    python -m support.bridge.runs OUT '[{"precision": "bf16_with_fp8_blockwise_mixed"}, ...]'

Importing Bridge takes longer than a run, so a process holds many. A run that was refused leaves the others alone. The
last rank writes what it saw as JSON.
"""

import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from support import ROOT, TESTS

ENVIRONMENT = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def run_all(jobs, folder, ranks=1):
    """What a process, or two under torchrun, saw of these jobs, in their order."""
    out = Path(folder, f"seen{ranks}.json")
    words = ["-m", "support.bridge.runs", str(out), json.dumps(jobs)]
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, ROOT)))}
    env |= {"OMP_NUM_THREADS": str(2 // ranks)}
    done = subprocess.run(
        [sys.executable, *launcher, *words], env=env, cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert out.exists(), f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(out.read_text())


def main(out, jobs):
    import torch

    torch.distributed.init_process_group(  # ours, so that no run ends it
        "gloo", timeout=timedelta(minutes=3), **{} if "RANK" in os.environ else _alone()
    )
    seen = []
    for job in jobs:
        seen.append(_seen(**job))
        _without_groups()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        Path(out).write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


def _without_groups():
    """End every group of ranks but the world's: Bridge leaves those of a run, each with a thread of gloo's that polls,
    and after thirty runs two cores do nothing else."""
    from torch.distributed import destroy_process_group, distributed_c10d

    world = distributed_c10d.GroupMember.WORLD
    for group in [group for group in distributed_c10d._world.pg_map if group is not world]:
        destroy_process_group(group)


def _alone():
    import torch

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}


def _seen(**job):
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()  # or TE goes on to reduce amaxes of the last run's model, over that run's ranks
    try:
        return train(**job)
    except (AssertionError, RuntimeError, ValueError) as error:
        traceback.print_exc()
        _forget()
        return {"refused": str(error)}


def train(
    precision="bf16_mixed",
    contract=None,
    registered=False,
    override=None,
    kind="gpt",
    hf=None,
    exactly=False,
    written=False,
    experts=False,
    model=None,
    monitor=0,
    tensorboard=None,
    recipe=None,
    rules=None,
    export=None,
    imported=None,
    **settings,
):
    """Train as a job says; return losses, gradient norms, kinds of parameters and what its callbacks saw.

    ``precision`` is a name of Bridge's registry, with ours in it where ``registered``; or ``contract`` are fields of
    ours, and ``override`` of the resulting MixedPrecisionConfig. ``hf`` is the folder of a checkpoint to start from,
    loaded ``exactly`` by a call of ours. ``written``: the provider writes into weights that it has constructed.
    ``recipe`` is the content of Megatron's file of recipes by module, or ``rules`` are those of a contract that it is
    rendered from. ``export`` is a file for the weights that the masters give before the first step. ``imported`` is a
    folder into which a checkpoint of Hugging Face's is converted, instead of a training.
    """
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from nemo_fp8 import Precision, bridge
    from nemo_fp8.bridge.loading import load_exactly
    from nemo_fp8.bridge.patches import replace_for_bridge
    from support.bridge import tiny

    replace_for_bridge()
    if registered:
        bridge.register_presets()
    elif contract is not None:
        precision = bridge.bridge_config(Precision.from_dict(contract) if isinstance(contract, dict) else contract)
    for name, value in (override or {}).items():
        setattr(precision, name, value)
    changes = (model or {}) | (tiny.EXPERTS if experts else {})
    if hf is None:
        provider = tiny.provider(kind, **changes)
    else:
        from megatron.bridge import AutoBridge

        auto = AutoBridge.from_hf_pretrained(hf)
        if imported:
            bridge.require_tokenizer(hf)
            AutoBridge.import_ckpt(hf, imported)
            _forget()
            return {}
        provider = auto.to_megatron_provider(load_weights="base" not in settings)
        provider.seq_length = tiny.LENGTH
        for name, value in changes.items():
            setattr(provider, name, value)
        if exactly:
            load_exactly(provider)
    if written:
        provider.provide = _writing(provider.provide)
    if rules:
        from nemo_fp8.render.te_precision import to_te_precision

        recipe = to_te_precision(Precision.from_dict(rules))
    if recipe:
        from megatron.core.quantization.quant_config import RecipeConfig

        provider.quant_recipe = RecipeConfig.from_config_dict(recipe)
    found = {"losses": [], "norms": [], "kinds": {}, "masters": {}, "quantizers": {}, "largest": {}, "validation": []}
    first = {}

    class See(Callback):
        def on_train_start(self, context):
            if export:
                from safetensors.torch import save_file

                out = dict(bridge.hugging_face_weights(auto, context.model, context.optimizer))
                save_file({name: weight.contiguous() for name, weight in out.items()}, export)
            for name, weight in _weights(context):
                found["kinds"][name] = type(weight).__name__
                first[name] = _values(weight)
                if hasattr(weight, "_scale_inv"):
                    found["largest"][name] = float((first[name] / weight._scale_inv).abs().max())
                if (master := getattr(weight, "main_param", None)) is not None and hf:
                    found["masters"][name] = [_sum(master), float(master.float().norm())]

        def on_train_step_end(self, context):
            for loss in context.loss_dict.values():  # none on a pipeline stage that is not the last
                found["losses"].append(float(loss[0] / loss[1]) if loss.numel() == 2 else float(loss))
            skipped = context.grad_norm is None  # FP16, with a scale of the loss that is too large yet
            found["norms"].append(None if skipped else float(context.grad_norm))

        def on_eval_end(self, context):
            found["validation"] += [float(loss) for loss in (context.total_loss_dict or {}).values()]

        def on_train_end(self, context):
            found["quantizers"] = _quantizers(context.model[0])
            found["changed"] = [name for name, w in _weights(context) if not _values(w).equal(first[name])]

    callbacks = [See()]
    if monitor:
        callbacks.append(bridge.BridgeMonitor(every_n_steps=monitor))
    cfg = tiny.config(provider, precision, **settings)
    if tensorboard:
        cfg.logger.tensorboard_dir = tensorboard
    found["findings"] = [f.code for f in bridge.start_findings(cfg)]
    pretrain(cfg, forward_step, callbacks=callbacks)
    found["precision"] = type(cfg.mixed_precision).__name__
    if monitor:
        found |= {"rows": callbacks[1].rows, "skipped": callbacks[1].skipped}
    return found


def _writing(provide):
    """A provider's ``provide`` that writes into the weights, where nothing can repair it."""
    import torch

    def written(*args, **kwargs):
        model = provide(*args, **kwargs)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape) * 0.02)
        return model

    return written


def _weights(context):
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(context.model):
        yield from chunk.named_parameters()


def _values(weight):
    return weight.detach().float().clone()


def _sum(tensor):
    return float(tensor.double().sum())


def _quantizers(model):
    """Linear -> the recipe that it ran under in its last step; None for one in the compute dtype."""
    return {
        name.removeprefix("module.module."): type(module.fp8_meta["recipe"]).__name__ if module.fp8 else None
        for name, module in model.named_modules()
        if hasattr(module, "fp8_meta") and "linear_" in name
    }


def _forget():
    """Take away what a run that failed leaves of its own in the process."""
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.core import parallel_state

    destroy_global_state()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
