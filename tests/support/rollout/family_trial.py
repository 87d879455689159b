"""Try a family: a push of other weights must leave every bit, and every log-probability, that a fresh start leaves.

in_memory     vLLM's model in this process: started, pushed into with its tensors in any order, read back, and held bit
              by bit against a fresh one
in_engines    two engines that start from two checkpoints; the first is pushed the second's weights, and its own back
"""

import gc
import json
import random
import re

import torch

from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.engine.report import grid_report
from nemo_fp8.rollout.engine.selection import in_every_layer
from nemo_fp8.rollout.refit.worker.held import NemoFp8Held
from support.rollout import engines, families
from support.rollout.held import differing, held
from support.rollout.in_process import Worker, build
from support.rollout.models import weights_of


class HeldWorker(Worker, NemoFp8Held):
    """A worker that can be asked what it holds."""


def folders(root, family):
    """Two checkpoints of a family, with other weights."""
    return [
        folder if (folder / "config.json").exists() else families.write(folder, family, seed)
        for seed in (0, 1)
        for folder in [root / f"{family}-{seed}"]
    ]


def tried(root, family, trial):
    """What a trial found; why vLLM itself does not start the family's model here, or an engine of it, if it does
    not."""
    known = {"config": families.FAMILIES[family][0]}
    try:
        return known | {"architecture": architecture(root, family), trial.__name__: trial(root, family)}
    except Exception:
        if why := not_in_bf16(root, family):
            return known | {"not in BF16": why}
        if trial is in_engines and (why := no_engine(root, family)):
            return known | {"no engine": why}
        raise


def no_engine(root, family):
    """Why an engine of vLLM alone does not answer on this machine; nothing if it does."""
    try:
        llm = engines.start(folders(root, family)[0], apart=False, distributed_executor_backend="uni")
        engines.log_probs(llm, 1)
        engines.stop(llm)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def in_memory(root, family, **contract):
    """What a model of this family holds in FP8, what its loader computes, and what a push left unlike a load."""
    old, new = folders(root, family)
    worker = HeldWorker(build(old, **contract))
    model = worker.model_runner.get_model()
    weights = [*as_taken(weights_of(new), worker.call("expected", {})).items()]
    random.Random(0).shuffle(weights)
    receipt = Refit(worker, chunk=2**20).push(dict(weights), verify=True)
    prints = {tensor.name: dict(tensor.fingerprints) for tensor in receipt.tensors}
    back = read_back(worker)
    told = [tensor for tensor, parts in back.items() if any(prints[tensor][part] != parts[part] for part in parts)]
    layers = grid_report(model)
    return {
        "fp8": sorted({in_every_layer(name) for name, layer in layers.items() if layer.stored == "fp8"}),
        "kept": {in_every_layer(name): layer.why for name, layer in layers.items() if layer.why},
        "computed": computed(receipt),
        "problems": [str(problem) for problem in receipt.problems],
        "verified": receipt.verified,
        "read back otherwise": told,
        "differing": differing(held(model), held(build(new, **contract))),
    }


def as_taken(weights, answers):
    """Weights with those rounded that come in FP32 and that the engine takes in BF16, as its loader rounds them."""
    dtypes = {name: dtype for answer in answers for name, dtype, _ in answer["tensors"]}
    rounded = (torch.float32, "bfloat16")
    return {name: one.bfloat16() if (one.dtype, dtypes.get(name)) == rounded else one for name, one in weights.items()}


def computed(receipt):
    """{kind of tensor: what the loader makes of it}."""
    found = {}
    for tensor in receipt.tensors:
        for part in tensor.fingerprints:
            if " of " in part:
                made = re.search(r" by (.*) \(\w+\)$", part)[1]
                found[in_every_layer(tensor.name)] = made
    return found


def in_engines(root, family):
    """Whether an engine that was pushed to answers bit by bit as one that was started from the same weights."""
    gc.collect()  # an engine that did not start ends vLLM's process groups, ours too, when it is collected
    old, new = folders(root, family)
    fresh = _answers(new)[0]
    started, pushed, back = _answers(old, weights_of(new), weights_of(old))
    return {
        "as a fresh engine": torch.equal(pushed, fresh),
        "back again": torch.equal(back, started),
        "other weights, other answers": not torch.equal(pushed, started),
        "finite": bool(pushed.isfinite().all()),
    }


def _answers(folder, *pushes):
    llm = engines.start(folder, apart=False, distributed_executor_backend="uni", **engines.fp8(weight_scale="pow2"))
    try:
        found = [engines.log_probs(llm, 2)]
        for weights in pushes:
            taken = as_taken(weights, llm.collective_rpc("nemo_fp8_refit_expected", args=({},)))
            Refit(llm).push(taken, verify=True).require()
            found.append(engines.log_probs(llm, 2))
        return found
    finally:
        engines.stop(llm)


def architecture(root, family):
    """The name under which vLLM knows the model."""
    return json.loads((folders(root, family)[0] / "config.json").read_text())["architectures"][0]


def not_in_bf16(root, family):
    """Why vLLM alone does not start this family's model on this machine; nothing if it does."""
    try:
        build(folders(root, family)[0], quantized=False)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
