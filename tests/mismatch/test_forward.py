"""The plain decoder against transformers' models, and its FP8 against linears that are quantized by hand."""

import pytest
import torch
import torch.nn.functional as F
from support import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch import Run, compare_weights, log_probs, pad, predict, sides_apart
from nemo_fp8.mismatch.weights import reference
from nemo_fp8.numerics import bf16, gemm, quantize

FP8 = Precision(rollout="fp8")


def by_transformers(config, weights, tokens):
    transformers = pytest.importorskip("transformers")
    config = dict(config)
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    missing, unexpected = model.load_state_dict({name: t.float() for name, t in weights.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1].log_softmax(-1)
    return F.pad(logits.gather(2, tokens[:, 1:, None])[..., 0], (1, 0))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_as_transformers_computes_it(family):
    config = tiny.config(family)
    weights, tokens = tiny.state_dict(config), tiny.tokens()
    expected = by_transformers(config, weights, tokens)
    found = log_probs(config, weights, tokens, Run(dtype=torch.float32), batch=5)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    in_bf16 = log_probs(config, weights, tokens)
    assert (in_bf16 - expected).abs().mean() < 0.3
    assert torch.equal(in_bf16, log_probs(config, weights, tokens, Run(Precision())))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rotary_embeddings(rope):
    config = tiny.config("llama", rope_scaling=rope)
    weights, tokens = tiny.state_dict(config), tiny.tokens(4, 100)
    found = log_probs(config, weights, tokens, Run(dtype=torch.float32))
    torch.testing.assert_close(found, by_transformers(config, weights, tokens), rtol=0, atol=2e-4)
    # As transformers 5 writes it down.
    newer = {k: v for k, v in config.items() if not k.startswith("rope")} | {
        "rope_parameters": rope | {"rope_theta": 10000.0}
    }
    assert torch.equal(log_probs(newer, weights, tokens, Run(dtype=torch.float32)), found)


def test_moe_with_dense_layers_between():
    config = tiny.config("qwen3_moe", decoder_sparse_step=2)
    dense, sparse = tiny.state_dict(tiny.config("qwen3")), tiny.state_dict(tiny.config("qwen3_moe"))
    weights = {n: t for n, t in dense.items() if ".layers.1." not in n} | {
        n: t for n, t in sparse.items() if ".layers.1." in n
    }
    tokens = tiny.tokens(4)
    found = log_probs(config, weights, tokens, Run(dtype=torch.float32))
    torch.testing.assert_close(found, by_transformers(config, weights, tokens), rtol=0, atol=2e-4)


def dequantized(weights, precision):
    made = {name: q.dequantize() for name, q in reference(weights, precision)}
    return {name: made.get(name, t.float()) for name, t in weights.items()}


class Multiplied(TorchDispatchMode):
    """The types of the matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in flop_registry and "attention" not in func.overloadpacket.__name__:
            self.types.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_without_units_for_bf16_the_same_values_are_multiplied_in_fp32(monkeypatch, family, units):
    """Fused attention's forward is as fast in BF16 as in FP32, and stays as it is."""
    config = tiny.config(family)
    weights, tokens = tiny.state_dict(config), tiny.tokens(4)
    expected = log_probs(config, weights, tokens)
    for module in (bf16, gemm):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: units)
    with Multiplied() as multiplied:
        found = log_probs(config, weights, tokens)
        log_probs(config, weights, tokens, Run(FP8.replace(weight_scale="pow2", activation_scale="pow2")))
    assert multiplied.types == {torch.bfloat16 if units else torch.float32}
    assert (found - expected).abs().mean() < 0.02


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_alone_in_fp8_are_dequantized_weights(family, scale):
    """vLLM's kernels on a CPU: the model of the dequantized weights."""
    config = tiny.config(family)
    weights, tokens = tiny.state_dict(config), tiny.tokens()
    precision = FP8.replace(weight_scale=scale)
    found = log_probs(config, weights, tokens, Run(precision, activations=False, dtype=torch.float32))
    expected = by_transformers(config, dequantized(weights, precision), tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_activations_are_quantized_too(monkeypatch):
    """transformers' model, whose linears quantize their inputs in 1x128 groups by hand."""
    config = tiny.config("llama")
    weights, tokens = tiny.state_dict(config), tiny.tokens()
    held = dequantized(weights, FP8)
    plain = F.linear

    def linear(x, weight, bias=None):
        if weight.shape[0] == tiny.VOCABULARY:  # the head stays as it is
            return plain(x, weight, bias)
        groups = x.reshape(-1, x.shape[-1] // 128, 128)
        scale = groups.abs().amax(-1, keepdim=True) / 448
        codes = (groups / scale).to(torch.float8_e4m3fn).float()
        return plain((codes * scale).view(x.shape), weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    expected = by_transformers(config, held, tokens)
    monkeypatch.undo()
    found = log_probs(config, weights, tokens, Run(FP8, dtype=torch.float32))
    only_weights = log_probs(config, weights, tokens, Run(FP8, activations=False, dtype=torch.float32))
    # A code here and there lies on the other side of a rounding, so it is close, and not equal.
    assert (found - expected).abs().mean() < 0.25 * (only_weights - expected).abs().mean()


def test_which_linears_are_in_fp8_follows_the_contract():
    config = tiny.config("qwen3")
    weights, tokens = tiny.state_dict(config), tiny.tokens(4)
    names = [name for name, _ in reference(weights, FP8.replace(first_layers=1, keep=("*.down_proj",)), 3)]
    assert sorted({name.split(".")[2] for name in names}) == ["1", "2"]
    assert not any("down_proj" in name or "norm" in name or "embed" in name or "head" in name for name in names)
    everything_kept = FP8.replace(keep=("*",))
    assert torch.equal(log_probs(config, weights, tokens, Run(everything_kept)), log_probs(config, weights, tokens))
    one = log_probs(config, weights, tokens, Run(FP8.replace(first_layers=2, last_layers=0), activations=False))
    by_hand = {n: q.dequantize(torch.bfloat16) for n, q in reference(weights, FP8, 3) if ".layers.2." in n}
    assert torch.equal(one, log_probs(config, weights | by_hand, tokens))


def test_the_trainer_s_own_fp8():
    """Blockwise training with the scales of the rollout is the same forward, to the bit."""
    same = Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32")
    config = tiny.config("qwen3")
    weights, tokens = tiny.state_dict(config), tiny.tokens(4)
    assert torch.equal(
        log_probs(config, weights, tokens, Run(same, side="train")), log_probs(config, weights, tokens, Run(same))
    )
    for scaling in ("delayed", "tensorwise", "mxfp8"):
        other = Precision(format="hybrid", scaling=scaling)
        assert not torch.equal(
            log_probs(config, weights, tokens, Run(other, side="train")), log_probs(config, weights, tokens)
        )


def test_fp8_kv_cache():
    config = tiny.config("qwen3")
    weights, tokens = tiny.state_dict(config), tiny.tokens(4)
    plain, cached = (log_probs(config, weights, tokens, Run(FP8.replace(kv_cache=kv))) for kv in ("auto", "fp8"))
    assert 1e-3 < (plain - cached).abs().mean() < 0.5


def test_padding_on_the_right_changes_nothing():
    config = tiny.config("llama")
    weights = tiny.state_dict(config)
    sequences = [list(range(5, 20)), [3, 1, 4, 1, 5], [9]]
    tokens, mask = pad(sequences)
    assert mask.sum(1).tolist() == [14, 4, 0]
    together = log_probs(config, weights, tokens, Run(dtype=torch.float32))
    for row, sequence in zip(together, sequences, strict=True):
        alone = log_probs(config, weights, torch.tensor([sequence]), Run(dtype=torch.float32))[0]
        torch.testing.assert_close(row[: len(sequence)], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "Unknown model_type to emulate 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "Unknown rope_type to emulate 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "KeyError: 'factor'"),
        ({"rms_norm_eps": None}, "lacks a size that the forward needs"),
    ],
)
def test_models_that_are_not_emulated_are_refused(changes, says):
    with pytest.raises(PrecisionError, match=says):
        log_probs(tiny.config() | changes, {}, tiny.tokens())


def test_whoever_takes_a_contract_takes_its_name():
    config = tiny.config()
    weights, tokens, name = tiny.state_dict(config), tiny.tokens(8, 6), "bf16_with_fp8_blockwise_mixed"
    one, two = (predict(config, weights, tokens, said) for said in (name, preset(name)))
    assert torch.equal(one.rollout, two.rollout)
    assert compare_weights(weights, {}, name) == compare_weights(weights, {}, preset(name)) != []
    assert [*sides_apart(weights, name)] == [*sides_apart(weights, preset(name))]
    for wrong in (None, {"format": "hybrid"}):
        with pytest.raises(PrecisionError, match="is no contract"):
            predict(config, weights, tokens, wrong)
    for wrong in (None, tokens[0], tokens.float()):
        with pytest.raises(PrecisionError, match="whole numbers"):
            predict(config, weights, wrong, name)


def test_questions_without_an_answer():
    config = tiny.config()
    weights = tiny.state_dict(config)
    with pytest.raises(PrecisionError, match=r"no model\.norm\.weight"):
        log_probs(config, {n: t for n, t in weights.items() if n != "model.norm.weight"}, tiny.tokens())
    with pytest.raises(PrecisionError, match="Token ids from 0 to 200 for a vocabulary of 160"):
        log_probs(config, weights, torch.tensor([[0, 200]]))
    with pytest.raises(PrecisionError, match="Tokens of shape"):
        log_probs(config, weights, torch.zeros(2, 3))
    with pytest.raises(PrecisionError, match="static"):
        log_probs(config, weights, tiny.tokens(), Run(FP8.replace(rollout_block="tensor", activation_scheme="static")))
    with pytest.raises(PrecisionError, match="without tokens"):
        pad([[1], []])


def test_a_quantized_weight_is_the_workers():
    """The reference is numerics' cast of each tensor, nothing else."""
    weights = tiny.state_dict(tiny.config())
    for name, q in reference(weights, FP8):
        expected = quantize(weights[name], Operand("e4m3", (128, 128), "fp32"))
        assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(q.scale_inv, expected.scale_inv)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rules_by_module_change_the_forward_of_their_modules_alone(family):
    config = tiny.config(family)
    weights, tokens = tiny.state_dict(config), tiny.tokens()

    def run(**fields):
        return log_probs(config, weights, tokens, Run(Precision(rollout="fp8", **fields)))

    kept = run(keep=("*.linear_qkv",))
    assert torch.equal(run(modules=(("*.linear_qkv", "bf16"),)), kept)
    ruled = run(modules=(("*.linear_qkv", "bf16"), ("*.linear_proj", "mxfp8")))
    assert not torch.equal(ruled, kept)
    everything = run(modules=(("*", "mxfp8"),))
    assert torch.equal(everything, run(rollout_block="1x32", weight_scale="pow2", activation_scale="pow2"))


@pytest.mark.parametrize("activations", [True, False])
def test_four_bits_are_far_from_bf16_and_weights_alone_are_nearer(activations):
    config = tiny.config("llama")
    weights, tokens = tiny.state_dict(config), tiny.tokens()
    plain = log_probs(config, weights, tokens)

    def apart(**fields):
        found = log_probs(config, weights, tokens, Run(Precision(**fields), activations=activations))
        return (found - plain).abs().mean()

    four, eight = apart(rollout="nvfp4"), apart(rollout="fp8")
    assert four > 2 * eight
    weights_alone = apart(rollout="nvfp4", activation_scheme="none")
    assert (weights_alone < four) == activations
