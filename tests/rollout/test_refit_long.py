"""The whole matrix of pushes, each case with an engine of its own: dense and MoE, tied and not, both scales, every
executor."""

import json
import os
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.rollout import models, refit_matrix
from support.rollout.engines import MX, fp8, log_probs

from nemo_fp8.contract import Precision
from nemo_fp8.rollout import Refit, engine_args
from nemo_fp8.storage.safetensors import Checkpoint

KINDS = ("qwen3", "llama", "llama_tied", "qwen3_moe")


@pytest.mark.long
@pytest.mark.parametrize("executor", refit_matrix.EXECUTORS)
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("kind", KINDS)
def test_pushes_are_bitwise_a_fresh_engine(kind, scale, executor):
    told = refit_matrix.run(executor, kind, {"weight_scale": scale})
    assert told["bitwise"] == [True] * 4
    assert told["differ"]
    assert told["prints"] == [1, 1]
    assert told["workers"] == (1 if executor in ("one", "server") else 2)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["one", "mp", "server"])
@pytest.mark.parametrize("delta", [False, True], ids=["everything", "changes"])
def test_pushes_by_rows_are_bitwise_a_fresh_engine(delta, executor):
    """In BF16, multiplied as it lies in a checkpoint: changes are patched there, too."""
    told = refit_matrix.run(executor, "llama_tied", {"rollout": "compute", "unquantized": "rows"}, delta=delta)
    assert told["bitwise"] == [True] * 4
    assert told["differ"]
    assert told["prints"] == [1, 1]
    assert [bool(why) for why in told["instead"]] == [True, False, False, False][: 4 * delta]
    assert all(share < 0.5 for share in told["shares"]), told["shares"]


@pytest.mark.long
@pytest.mark.parametrize("executor", ["one", "server"])
@pytest.mark.parametrize("delta", [False, True], ids=["everything", "changes"])
def test_fifty_pushes_leave_memory_flat(delta, executor):
    """Of the workers, of a server that they belong to, and of the sender; the last one leaves the engine as a fresh one
    is."""
    told = refit_matrix.run(executor, "qwen3", {}, pushes=50, delta=delta)
    assert all(told["bitwise"])
    assert told["prints"] == [1, 1]
    assert not any(told["instead"][1:])
    for sizes in (told["rss_kb"], told["sender_rss_kb"]):
        after_warm_up, at_end = sizes[9], sizes[-2]  # before the engine is asked again, which takes memory of its own
        assert after_warm_up > 0
        assert at_end - after_warm_up < 1024, json.dumps(sizes)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["one", "mp", "server", "server_mp"])
@pytest.mark.parametrize("fields", [{"weight_scale": "fp32"}, {"weight_scale": "pow2"}, MX], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_wide", "qwen3_moe_wide"])
def test_changes_are_bitwise_a_fresh_engine(kind, fields, executor):
    """Dense and experts, on one worker and on two, here and over HTTP: the first push is of everything, no other is,
    and every matrix in blocks is patched."""
    told = refit_matrix.run(executor, kind, fields, delta=True)
    assert told["bitwise"] == [True] * 4
    assert told["differ"]
    assert told["prints"] == [1, 1]
    assert [bool(why) for why in told["instead"]] == [True, False, False, False]
    assert told["workers"] == (2 if "mp" in executor else 1)
    assert len(told["shares"]) == 3
    assert max(told["shares"]) < 0.2, told["shares"]
    assert not [name for name in told["whole"] if name.endswith("_proj.weight")]


@pytest.mark.long
def test_experts_whose_blocks_a_cut_straddles_come_whole_and_right():
    """Of 128 rows each worker has 64, in blocks that are not those of the whole tensor."""
    told = refit_matrix.run("mp", "qwen3_moe", {}, delta=True)
    assert told["bitwise"] == [True] * 4
    assert told["differ"]
    assert told["prints"] == [1, 1]
    assert told["misaligned"]
    assert {".experts." in name for name in told["whole"] if name.endswith("_proj.weight")} == {True}


@pytest.mark.long
@pytest.mark.parametrize(
    "fields", [{"rollout_block": "tensor"}, {"kernel": "decode"}, {"activations": "emulated"}], ids=str
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_every_way_to_store_weights(engine, checkpoint, kind, fields):
    llm = engine(checkpoint(kind, 0), apart=True, **fp8(**fields))
    Refit(llm).push(load_file(checkpoint(kind, 1) / "model.safetensors"), verify=True).require()
    assert not torch.equal(log_probs(llm, 1, 200), llm.as_started)
    Refit(llm).push(load_file(checkpoint(kind, 0) / "model.safetensors"), verify=True).require()
    assert torch.equal(log_probs(llm, 1, 200), llm.as_started)


@pytest.mark.long
def test_scales_of_an_fp8_cache_come_along(engine, checkpoint):
    """Pushed scales change the answers, are what a calibrated engine would have, and go with the weights."""
    llm = engine(checkpoint("qwen3", 0), apart=True, **engine_args(Precision(rollout="fp8", kv_cache="fp8")))
    weights = load_file(checkpoint("qwen3", 0) / "model.safetensors")
    plain = log_probs(llm, 1, 200)
    scales = {f"model.layers.{i}.self_attn.attn.{which}_scale": torch.tensor(0.05) for i in range(4) for which in "kv"}
    receipt = Refit(llm).push(weights | scales).require()
    assert sum(t.kind == "kv scale" for t in receipt.tensors) == 8
    scaled = log_probs(llm, 1, 200)
    assert not torch.equal(scaled, plain)
    Refit(llm).push(weights)  # without scales, those of the engine stay
    assert torch.equal(log_probs(llm, 1, 200), scaled)
    Refit(llm).push(weights | {name: torch.tensor(1.0) for name in scales})
    assert torch.equal(log_probs(llm, 1, 200), plain)
    with pytest.raises(Exception, match="divided by it"):
        Refit(llm).push(weights | {name: torch.tensor(0.0) for name in scales})
    Refit(llm).push(weights | scales)
    assert torch.equal(log_probs(llm, 1, 200), scaled)


def _memory(pid, what):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


@pytest.mark.long
def test_a_push_takes_no_more_memory_than_its_chunk(engine, checkpoint):
    """200 MB of weights, half as many as codes, read tensor by tensor, through 8 MiB: neither side grows by more,
    whatever the model's size."""
    chunk, slack = 8 << 20, 12 << 20  # slack: strips of codes, one tensor of the file, allocators
    path = checkpoint("qwen3", 1, hidden=1024, layers=8, intermediate=3072) / "model.safetensors"
    llm = engine(checkpoint("qwen3", 0, hidden=1024, layers=8, intermediate=3072), apart=True, **fp8())
    refit, me = Refit(llm, chunk=chunk), psutil.Process()

    def tensors():  # read, and not mapped: pages of the file would count as memory
        file = Checkpoint.open(path)
        for name in file.entries:
            yield from ((name, tensor) for tensor in file.stored(name))
        file.close()

    refit.push(tensors())
    pids = [me.pid, *(child.pid for child in me.children(recursive=True) if "Worker" in child.name())]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = [(_memory(pid, "VmHWM"), _memory(pid, "RssFile")) for pid in pids]
    receipt = refit.push(tensors())
    assert receipt.chunk_bytes <= chunk
    assert receipt.bytes > 10 * chunk
    for pid, (start, files) in zip(pids, before, strict=True):
        mapped = max(0, _memory(pid, "RssFile") - files)  # pages of libraries
        grown = _memory(pid, "VmHWM") - start - mapped
        assert grown < chunk + slack, f"{'sender' if pid == os.getpid() else 'worker'} grew by {grown / 2**20:.0f} MiB"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3", "llama_tied"])
def test_adapters_stay_over_pushes(engine, checkpoint, tmp_path, kind):
    """Requests with and without one, after pushes of everything and of changes. With experts vLLM's CPU build answers
    none, in BF16 neither."""
    from vllm.lora.request import LoRARequest

    weights = [load_file(checkpoint(kind, seed) / "model.safetensors") for seed in (0, 1)]
    adapter = models.write_adapter(tmp_path / "adapter", weights[0])
    arguments = {"apart": True, "enable_lora": True, "max_lora_rank": 8, **fp8()}

    def answers(llm):
        return [log_probs(llm, 1, 100, lora_request=one) for one in (None, LoRARequest("a", 1, str(adapter)))]

    llm = engine(checkpoint(kind, 0), **arguments)
    refit, expected = Refit(llm), [answers(llm), answers(engine(checkpoint(kind, 1), **arguments))]
    assert not torch.equal(*expected[0])
    for seed in (1, 0, 1):
        receipt = refit.push(weights[seed], delta=True).require()
        assert all(map(torch.equal, answers(llm), expected[seed]))
    assert receipt.delta.instead == ""
