"""Hypothesis strategies: every valid contract, built field by field so that none has to be thrown away."""

from hypothesis import strategies as st

from nemo_fp8.contract import Precision
from nemo_fp8.contract.precision import SCALINGS
from nemo_fp8.errors import PrecisionError

counts = st.integers(0, 3)
patterns = st.sampled_from(["*.router", "*.linear_fc2", "re:layers\\.(0|3)\\.", "lm_head", "*embed*"])
of_rules = st.sampled_from(
    [
        *("*.linear_qkv", "*.linear_proj", "*.linear_fc1", "*.mlp.linear_fc2", "*.self_attention.*", "*.mlp.experts.*"),
        *("*.layers.0.*", "*.layers.17.mlp.*", "*.layers.[0-3].*", "*.linear_attn.*", "*.o_proj", "re:layers\\.0\\."),
    ]
)
positive = st.floats(min_value=2**-20, max_value=2.0**32, allow_nan=False)


@st.composite
def contracts(draw):
    """A contract of any kind: without FP8, with each recipe, with each rollout."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    flag = lambda: draw(st.booleans())  # noqa: E731
    f: dict = {"compute": one_of("bf16", "fp16", "fp32"), "grad_reduce": one_of("fp32", "compute")}
    scaling = one_of(None, "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
    four = scaling == "nvfp4"
    f |= {"scaling": scaling, "format": "e2m1" if four else one_of("hybrid", "e4m3") if scaling else None}
    f |= {"wgrad": four or flag(), "compute": "bf16" if four else f["compute"]}
    if scaling not in (None, "delayed"):
        f["backward"] = one_of("quantized", "dequantized", "high_precision")
    if four:
        scopes = ("none", "weights", "activations", "all")
        f |= {"weight_block": one_of("16x16", "1x16"), "hadamard": flag(), "stochastic_rounding": flag()}
        f |= {"row_scaled": flag(), "four_over_six": one_of(*(scopes[:2] if f["hadamard"] else scopes))}
        if f["four_over_six"] != "none":
            f |= {"four_over_six_error": one_of("mae", "mse"), "four_over_six_bound_256": one_of(*scopes)}
    f |= {"margin": draw(st.integers(-4, 4)), "amax_history_len": draw(st.integers(1, 2048))}
    f |= {"amax_compute_algo": one_of("max", "most_recent")}
    if scaling and scaling not in ("blockwise", "nvfp4"):
        f |= {"attention": flag(), "multi_head_attention": flag()}
    f["fp8_param"] = bool(scaling) and not four and f["compute"] != "fp32" and flag()
    if scaling != "delayed":
        f |= {"first_layers": draw(counts), "last_layers": draw(counts)}
    f |= {"keep": tuple(draw(st.lists(patterns, max_size=3, unique=True))), "strict": flag()}
    f |= {"loss_scale": draw(st.none() | positive), "initial_loss_scale": draw(st.floats(4, 2.0**32))}
    f |= {
        "min_loss_scale": draw(st.floats(0.5, 4)),
        "loss_scale_window": draw(st.integers(1, 5000)),
        "hysteresis": draw(st.integers(1, 8)),
    }
    f |= {
        "rollout": one_of(None, "compute", "fp8", "nvfp4"),
        "kv_cache": one_of("auto", "fp8"),
        "importance_sampling": one_of(None, True, False),
    }
    fp8_rollout = f["rollout"] == "fp8" or (f["rollout"] is None and scaling is not None and not four)
    if f["rollout"] == "nvfp4" or (f["rollout"] is None and four):
        only_fp32 = scaling == "delayed"
        scales = ("pow2",) if scaling == "mxfp8" else ("fp32",) if only_fp32 else ("fp32", "pow2")
        f |= {"rollout_block": "1x16", "activation_scheme": one_of("dynamic", "none")}
        return Precision(**f, weight_scale=one_of(*scales), activation_scale=one_of(*scales))
    block = one_of("128x128", "1x32", "tensor")
    f["rollout_block"] = block
    f["activation_scheme"] = one_of("dynamic", "static") if not fp8_rollout or block == "tensor" else "dynamic"
    f["deep_gemm"] = fp8_rollout and block == "128x128" and flag()
    only_pow2 = scaling == "mxfp8" or (fp8_rollout and block == "1x32")
    only_fp32 = scaling == "delayed" and not fp8_rollout
    scales = ("pow2",) if only_pow2 else ("fp32",) if only_fp32 else ("fp32", "pow2")
    return Precision(**f, weight_scale=one_of(*scales), activation_scale=one_of(*scales))


@st.composite
def ruled_contracts(draw, of=None):
    """A contract with one to three rules for modules, or another recipe for its backward, or both.

    ``of`` is where contracts are drawn from; their own rules come first. Delayed scaling and contracts without any
    format have neither, and are returned as they are.
    """
    p = draw(contracts() if of is None else of)
    if draw(st.booleans()):
        p = p.replace(keep=())  # regular expressions in it are refused by all that reads Megatron's file of recipes
    if behind := _possible(p, "backward_scaling", ("mxfp8", "nvfp4")):
        p = p.replace(backward_scaling=draw(st.sampled_from([None, *behind])))
    recipes = _possible(p, "modules", [(("*", recipe),) for recipe in (p.compute, *SCALINGS)])
    if recipes and (p.backward_scaling is None or draw(st.booleans())):
        # Half of the rules are for the compute dtype, which most programs have a word for.
        recipe = st.just(p.compute) | st.sampled_from([rule[0][1] for rule in recipes])
        p = p.replace(modules=(*p.modules, *draw(st.lists(st.tuples(of_rules, recipe), min_size=1, max_size=3))))
    return p


def _possible(p, field, values):
    """The values of a field with which the contract contradicts nothing."""
    found = []
    for value in values:
        try:
            p.replace(**{field: value})
        except PrecisionError:
            continue
        found.append(value)
    return found
