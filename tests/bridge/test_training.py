"""Megatron-Bridge's own ``pretrain`` on a CPU over gloo, under every recipe: it trains, in the precision that was asked
for, the same on every layout, and goes on from a checkpoint as if it had never stopped."""

from collections import Counter

import pytest
from support.bridge.jobs import EVERYWHERE, FP8, QUANTIZED, STORED, in_folder
from support.bridge.runs import run_all

RECIPE = {
    "delayed": "TEDelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
LINEARS = 16  # four in each of four layers


def losses(run):
    assert "refused" not in run, run["refused"]
    return run["losses"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_recipe_trains_by_a_name_of_bridges_registry(alone, name):
    run = alone[name]
    assert losses(run) == pytest.approx(losses(alone["bf16"]), rel=0.02 if name == "nvfp4" else 0.002)
    assert losses(run) != losses(alone["bf16"])
    assert losses(run)[-1] < losses(run)[0] - 0.1
    kept = 8 if name == "tensorwise" else 0  # the preset keeps the first and the last layer
    assert Counter(run["quantizers"].values()) == +Counter({RECIPE[name]: LINEARS - kept, None: kept})
    assert run["precision"] == "ContractPrecision"


@pytest.mark.parametrize("name", FP8)
def test_weights_lie_in_fp8_where_the_contract_says_so(alone, name):
    kinds = Counter(alone[name]["kinds"].values())
    stored = {"delayed": {"Float8Tensor": 16}, "tensorwise": {"Float8Tensor": 8}, "mxfp8": {"MXFP8Tensor": 16}}
    assert kinds - Counter(Parameter=kinds["Parameter"]) == Counter(stored.get(name, {}))
    assert (name in stored) == (name in STORED)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_models_of_bridges_own_providers_train(alone, kind):
    run = alone[kind]
    assert losses(run)[-1] < losses(run)[0] - 0.1
    assert set(run["quantizers"].values()) == {RECIPE["blockwise"]}


def test_a_module_that_is_kept_computes_and_lies_in_bf16(alone):
    run = alone["kept"]
    losses(run)
    kept = {f"decoder.layers.1.mlp.linear_fc{i}" for i in (1, 2)}
    assert {name for name, recipe in run["quantizers"].items() if recipe is None} == kept
    plain = {name for name, kind in run["kinds"].items() if kind == "Parameter" and name.endswith("weight")}
    assert {f"{name}.weight" for name in kept} <= plain
    assert Counter(run["kinds"].values())["Float8Tensor"] == LINEARS - 2


def test_rules_by_module_are_what_megatron_does_with_the_file_that_is_rendered(alone):
    """The same codes, and so the same losses to the bit: by hooks of ours, or by Megatron's ``quant_recipe``."""
    run, theirs = alone["ruled"], alone["ruled-by-megatron"]
    assert losses(run) == losses(theirs)
    assert run["norms"] == theirs["norms"]
    assert run["quantizers"] == theirs["quantizers"]
    assert losses(run) != losses(alone["modules"])
    assert Counter(run["quantizers"].values()) == {None: 4, "MXFP8BlockScaling": 4, "Float8BlockScaling": 6} | {
        "Float8CurrentScaling": 2
    }


def test_a_backward_with_a_recipe_of_its_own_trains(alone):
    run = alone["hybrid"]
    assert losses(run)[-1] < losses(run)[0] - 0.1
    assert set(run["quantizers"].values()) == {"CustomRecipe"}


def test_fp16_trains_as_bf16_does(alone):
    assert losses(alone["fp16"]) == pytest.approx(losses(alone["bf16"]), rel=0.001)
    assert losses(alone["fp16"]) != losses(alone["bf16"])


def test_fp16_skips_steps_until_the_scale_of_the_loss_fits(alone):
    run = alone["fp16-begun-too-high"]
    skipped = [norm is None for norm in run["norms"]]
    assert skipped[0]
    assert not all(skipped)
    assert losses(run)[-1] < losses(run)[0] - 0.1
    assert set(run["quantizers"].values()) == {RECIPE["mxfp8"]}


def test_a_recipe_for_single_modules_is_left_to_the_provider(alone):
    """Bridge overwrites every FP8 field of the provider; ``quant_recipe`` is none of them."""
    run = alone["modules"]
    losses(run)
    by_name = {}
    for name, recipe in run["quantizers"].items():
        by_name.setdefault(name.rpartition(".")[2], set()).add(recipe)
    assert by_name == {
        "linear_proj": {None},
        "linear_qkv": {RECIPE["blockwise"]},
        "linear_fc1": {RECIPE["mxfp8"]},
        "linear_fc2": {RECIPE["blockwise"]},
    }


# ---------------------------------------------------------------------- two processes


def test_two_processes_train_as_one(alone, pair):
    for name in ("bf16", "blockwise", "mxfp8"):
        assert losses(pair[name]) == pytest.approx(losses(alone[name]), rel=2e-4), name
    # Gradients of NVFP4 are rounded by chance, from each rank's own generator.
    assert losses(pair["nvfp4"]) == pytest.approx(losses(alone["nvfp4"])[:3], rel=5e-3)


def test_gathers_that_overlap_change_nothing(pair):
    assert losses(pair["mxfp8-overlapped"]) == losses(pair["mxfp8"])
    assert pair["mxfp8-overlapped"]["norms"] == pair["mxfp8"]["norms"]


def test_tensor_parallel_with_sequence_parallel(pair):
    run = pair["delayed-split-whole"]
    assert losses(run)[-1] < losses(run)[0] - 0.1
    assert Counter(run["kinds"].values())["Float8Tensor"] == LINEARS


def test_grouped_experts_on_two_ranks(pair):
    run = pair["tensorwise-experts"]
    assert losses(run)[-1] < losses(run)[0] - 0.1
    experts = {name: kind for name, kind in run["kinds"].items() if "experts.linear_fc" in name}
    assert len(experts) == 4 * 2 * 2  # layers, linears, experts of one rank
    assert {kind for name, kind in experts.items() if ".1." in name or ".2." in name} == {"Float8Tensor"}
    assert {kind for name, kind in experts.items() if ".layers.0." in name} == {"Parameter"}


def test_pipeline_stages_count_layers_over_all_of_them(pair):
    """The last stage, whose last layer the contract keeps, sees two layers of four."""
    run = pair["delayed-pipeline"]
    assert losses(run)[-1] < losses(run)[0] - 0.1
    kept = {f"decoder.layers.1.mlp.linear_fc{i}" for i in (1, 2)}
    assert {name for name, recipe in run["quantizers"].items() if recipe is None} == kept
    assert Counter(run["kinds"].values())["Float8Tensor"] == len(run["quantizers"]) - 2 == LINEARS // 2 - 2


def test_validation_leaves_no_amax_behind(pair):
    """Delayed scaling scales by amaxes of training alone, whatever was validated in between."""
    run, plain = pair["delayed-validated"], pair["delayed-resumed-whole"]
    assert losses(run) == losses(plain)
    assert run["norms"] == plain["norms"]
    assert len(run["validation"]) >= 4


# ---------------------------------------------------------------------- checkpoints


def resumed_exactly(runs, name):
    whole, first, second = (runs[f"{name}-{part}"] for part in ("whole", "first", "second"))
    assert losses(first) + losses(second) == losses(whole), name
    assert first["norms"] + second["norms"] == whole["norms"], name
    assert len(losses(second)) == 2


def test_a_run_that_was_saved_while_it_went_on_resumes_to_the_bit(alone):
    resumed_exactly(alone, "tensorwise-resumed")


def test_adapters_over_delayed_scaling_resume_to_the_bit(alone):
    """Bridge's checkpoint holds what is an adapter's alone, and the amaxes beneath under such a name."""
    resumed_exactly(alone, "adapted-resumed")


@pytest.mark.parametrize("layout", ["resumed", "split"])
def test_two_processes_resume_delayed_scaling_to_the_bit(pair, layout):
    """Tensor-parallel ranks too, of which a checkpoint holds the amaxes of one."""
    resumed_exactly(pair, f"delayed-{layout}")


# One process holds as many as are through in ten minutes, on a busy machine as well.
TOGETHER = ("split", "pipeline", "adapted", "experts", "data overlapped validated")


@pytest.mark.long
@pytest.mark.parametrize("layouts", TOGETHER)
def test_every_recipe_on_every_layout_trains_and_resumes(folder, layouts):
    jobs = {name: job for layout in layouts.split() for name, job in EVERYWHERE[layout].items()}
    runs = dict(zip(jobs, run_all(in_folder(jobs, folder), folder, ranks=2), strict=True))
    runs.pop("imported", None)
    for name, run in runs.items():
        losses(run)
        if name.endswith("-whole"):
            resumed_exactly(runs, name.removesuffix("-whole"))
        if "-adapted" in name:
            assert {".adapter." in changed for changed in run["changed"]} == {True}, name
        elif not name.endswith("-second"):
            assert losses(run)[-1] < losses(run)[0] - 0.05, name
        for unchanged in ("-overlapped", "-validated"):
            if name.endswith(unchanged):
                assert losses(run) == losses(runs[name.replace(unchanged, "-data")]), name


def test_every_layout_is_in_the_matrix():
    assert sorted(layout for layouts in TOGETHER for layout in layouts.split()) == sorted(EVERYWHERE)
