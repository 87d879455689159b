"""Real engines under the plugin: what they generate, what their workers hold, and the scales of their KV cache."""

import math

import pytest
import torch
from support.rollout import engines, families
from support.rollout.in_process import build, call
from support.rollout.models import VOCABULARY, tensors_of

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit, engine_args, kv_scales
from nemo_fp8.rollout.engine import kv

FP8 = Precision(rollout="fp8")


@pytest.fixture
def llm(engine, checkpoint):
    """A dense model in FP8 with an FP8 KV cache, which is rounded where vLLM has none."""
    return engine(checkpoint("qwen3"), **engine_args(FP8.replace(kv_cache="fp8")))


def test_fp8_on_a_bf16_checkpoint_generates_and_never_yields_nan(llm, here):
    found = engines.log_probs(llm)
    assert found.isfinite().all()
    assert torch.allclose(found.exp().sum(-1), torch.ones(found.shape[:2]), atol=1e-3)
    (report,) = llm.collective_rpc("nemo_fp8_report")
    assert {row["stored"] for row in report.values()} == {"fp8"}
    assert {row["kernel"] for row in report.values()} == {here.linear}
    assert len(report) == 4 * 4


# ---------------------------------------------------------------------- the KV cache


def test_kv_scales_are_calibrated_from_what_is_cached(llm, checkpoint):
    llm.reset_prefix_cache()
    scales = kv_scales.calibrate(llm.collective_rpc, lambda: one_token_each(llm))
    assert set(scales) == {f"model.layers.{i}.self_attn.attn.{which}_scale" for i in range(4) for which in "kv"}
    # The values of layer 0 depend on nothing before them, so the same layer in this process gives them.
    model = build(checkpoint("qwen3"))
    tokens = torch.tensor([prompt["prompt_token_ids"] for prompt in engines.prompts(8)]).flatten()
    hidden = call(model, "model.embed_tokens", tokens)
    values = call(model, "model.layers.0.self_attn.qkv_proj", call(model, "model.layers.0.input_layernorm", hidden))[
        :, -128:
    ]
    wanted = values.float().abs().flatten().kthvalue(math.ceil(values.numel() * 0.999)).values * 1.05 / 448
    assert scales["model.layers.0.self_attn.attn.v_scale"] == pytest.approx(wanted.item(), rel=2**-7)


def one_token_each(llm):
    from vllm import SamplingParams

    for prompt in engines.prompts(8):
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)


def test_kv_scales_can_be_put_in_place(llm):
    before = llm.collective_rpc("nemo_fp8_kv_scales")[0]
    plain = engines.log_probs(llm)
    kv_scales.apply(llm.collective_rpc, dict.fromkeys(before, 0.03))
    assert llm.collective_rpc("nemo_fp8_kv_scales")[0] == pytest.approx(dict.fromkeys(before, 0.03))
    scaled = engines.log_probs(llm)
    kv_scales.apply(llm.collective_rpc, before)
    assert not torch.equal(scaled, plain)
    assert (scaled - plain).abs().mean() < 0.1
    assert torch.equal(engines.log_probs(llm), plain)


def test_an_fp8_cache_is_not_one_of_bf16(here, llm, engine, checkpoint):
    """After all that was put on and taken off above, too. Scales of 1 round small values coarsely: by 0.06 in the mean,
    and vLLM's own cache on a CPU, which cuts off, by 0.12."""
    cached = engines.log_probs(llm, 1)
    plain = engines.log_probs(engine(checkpoint("qwen3"), **engine_args(FP8)), 1)
    assert not torch.equal(cached, plain)
    assert (cached - plain).abs().mean() < (0.15 if here.caches_fp8 else 0.1)


def test_vllm_s_own_cache_on_a_cpu_cuts_off_where_ours_rounds(here, llm, engine, checkpoint, monkeypatch):
    """The same model on a cache of BF16 whose values were cut off answers as with vLLM's; with rounded ones it does
    not."""
    if not here.caches_fp8:
        pytest.skip("vLLM has no FP8 cache on this processor")
    cached, arguments = engines.log_probs(llm, 1), engine_args(FP8)
    arguments["hf_overrides"]["quantization_config"]["cache"] = "rounded"
    ours = engine(checkpoint("qwen3"), **arguments)
    assert (engines.log_probs(ours, 1) - cached).abs().mean() > 0.1
    monkeypatch.setattr(kv, "rounded", cut_off)
    assert (engines.log_probs(ours, 1) - cached).abs().mean() < 0.05


def cut_off(values, scale):
    """What ``kv.rounded`` returns, rounded towards zero and not to the nearest."""
    sizes = (values.float() / scale).abs().clamp(max=448.0)
    steps = torch.exp2(sizes.log2().floor().clamp(min=-6) - 3)
    return ((sizes / steps).floor() * steps * scale).copysign(values.float()).to(values.dtype)


def test_what_is_rounded_is_what_an_fp8_cache_gives_back():
    values = torch.tensor([0.0, 1.0, 1.06, -1.0625, 500.0, -1e9, 2.0**-9, 2.0**-11, 17.3], dtype=torch.bfloat16)
    wanted = torch.tensor([0.0, 1.0, 1.0, -1.0, 448.0, -448.0, 2.0**-9, 0.0, 18.0], dtype=torch.bfloat16)
    assert torch.equal(kv.rounded(values, 1.0), wanted)
    assert torch.equal(kv.rounded(values * 0.25, 0.25), wanted * 0.25)


def test_latents_are_not_rounded_and_it_is_said(tmp_path, here):
    if here.caches_fp8:
        pytest.skip("vLLM has a cache of its own")
    arguments = engine_args(FP8.replace(kv_cache="fp8"))
    with pytest.raises(PrecisionError, match="latent attention"):
        build(families.write(tmp_path, "deepseek_v2"), arguments)


def test_calibrating_nothing_is_an_error(llm):
    with pytest.raises(PrecisionError, match="Nothing was written to the KV cache of 8 layers"):
        kv_scales.calibrate(llm.collective_rpc, lambda: None)
    with pytest.raises(PrecisionError, match="percentile=0"):
        kv_scales.calibrate(llm.collective_rpc, lambda: None, percentile=0)
    with pytest.raises(RuntimeError, match="mine"):  # the listener is taken off whatever happens
        kv_scales.calibrate(llm.collective_rpc, lambda: (_ for _ in ()).throw(RuntimeError("mine")))
    assert engines.log_probs(llm, count=1).isfinite().all()


@pytest.mark.parametrize("percentile", [50.0, 99.9, 100.0])
def test_percentiles_are_those_of_all_values_however_they_lie_on_workers(percentile):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = [counted(part) for part in values.split([300, 700])]
    scales = kv_scales.scales_of([{"layer": [c, c]} for c in counts], percentile, 1.0)
    wanted = values.float().abs().sort().values[max(0, round(1000 * percentile / 100) - 1)].item() / 448
    assert scales == {"layer.k_scale": pytest.approx(wanted), "layer.v_scale": pytest.approx(wanted)}
    assert (
        kv_scales.scales_of([{"layer": [counted(values), {0: 5}]}], percentile, 1.0)["layer.v_scale"] == 1.0
    )  # nothing but zeros


def counted(values):
    bits = (values.view(torch.int16) & 0x7FFF).tolist()
    return {b: bits.count(b) for b in set(bits)}


# ---------------------------------------------------------------------- more than one worker, and other starts


@pytest.mark.long
@pytest.mark.parametrize("executor", ["mp", "ray", "ray_before_v2"])
@pytest.mark.parametrize(("kind", "fields"), [("qwen3_wide", {}), ("qwen3_moe", {"weight_scale": "pow2"})])
def test_every_worker_holds_the_codes_of_its_shard(checkpoint, executor, kind, fields):
    """Two workers on each of vLLM's executors; the check cuts and quantizes shards by itself."""
    from support.rollout.several_workers import ask

    folder = checkpoint(kind)
    answer = ask(executor, folder, fields)
    assert [worker["rank"] for worker in answer["checks"]] == [0, 1]
    for worker in answer["checks"]:
        assert worker["differ"] == []
        assert worker["compared"] == (16 if kind == "qwen3_wide" else 72)
    assert answer["finite"]
    assert all(
        row["other_blocks"] is None for report in answer["reports"] for row in report.values() if kind == "qwen3_wide"
    )
    if kind == "qwen3_moe":  # 64 of 128 rows of each expert
        said = answer["reports"][1]["model.layers.0.mlp.experts.routed_experts"]["other_blocks"]
        assert said == "the shard begins at row 64 of gate_proj, inside a block of 128"


@pytest.mark.long
def test_compiled_graphs_hold_the_emulation(checkpoint):
    """The log-probabilities of torch.compile's graphs are those of eager mode, and not those without emulation.

    vLLM's graphs round between operators where eager mode does not, in BF16 too, and quantization makes more of it: a
    value beside the edge between two codes goes to the other one. How much is measured here, by norms whose weights are
    off by one rounding.
    """
    found, nudged, compiled = {}, {}, {}
    for activations in ("kernel", "emulated"):
        arguments = engine_args(Precision(rollout="fp8"), activations=activations)
        llm = engines.start(checkpoint("qwen3"), **arguments)
        found[activations] = engines.log_probs(llm)
        Refit(llm).push({name: _nudged(t) if "norm" in name else t for name, t in tensors_of(checkpoint("qwen3"))})
        nudged[activations] = engines.log_probs(llm)
        engines.stop(llm)
        llm = engines.start(checkpoint("qwen3"), **arguments, enforce_eager=False)
        compiled[activations] = engines.log_probs(llm)
        engines.stop(llm)
    for activations in found:
        explained = _apart(found[activations], nudged[activations])
        assert 0 < _apart(found[activations], compiled[activations]) < explained
    assert _apart(found["kernel"], found["emulated"]) > 0.03
    assert _apart(compiled["kernel"], compiled["emulated"]) > 0.03


def _nudged(tensor):
    """Every value by one rounding up, down or not at all."""
    step = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    return (tensor.view(torch.int16) + step).view(torch.bfloat16)


def _apart(a, b):
    return (a - b).abs().mean().item()


@pytest.mark.long
def test_an_engine_without_amx_s_kernel_falls_back_and_says_so_once(checkpoint, monkeypatch, capfd):
    """vLLM's own switch takes the kernel away in every process; then the same engine runs, is pushed to, and answers as
    ``codes`` does."""
    wanted = engines.start(checkpoint("qwen3"), **engine_args(Precision(rollout="fp8"), kernel="codes"))
    right = engines.log_probs(wanted)
    engines.stop(wanted)
    capfd.readouterr()
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel")
    llm = engines.start(checkpoint("qwen3", 1), **engine_args(Precision(rollout="fp8")))
    Refit(llm).push(dict(tensors_of(checkpoint("qwen3"))), verify=True).require()
    (report,) = llm.collective_rpc("nemo_fp8_report")
    found = engines.log_probs(llm)
    engines.stop(llm)
    assert {row["kernel"] for row in report.values()} == {"DecodeKernel"}
    assert torch.equal(found, right)
    said = "".join(capfd.readouterr())
    assert said.count("products with FP8 weights are summed in FP32 on this CPU") == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"activations": "emulated"}, {"kernel": "codes"}, {"kernel": "decode"}])
def test_every_model_generates_on_every_path(checkpoint, kind, options):
    llm = engines.start(checkpoint(kind), **engine_args(Precision(rollout="fp8"), **options))
    assert engines.log_probs(llm).isfinite().all()
    assert engines.log_probs(llm).shape[-1] == VOCABULARY
    engines.stop(llm)
