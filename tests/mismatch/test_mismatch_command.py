"""``nemo-fp8 mismatch``: files in both formats, exit codes, JSON, the page, and what it refuses."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from support import small_models, tiny
from typer.testing import CliRunner

from nemo_fp8.cli import app
from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export import HuggingFace, export
from nemo_fp8.mismatch import LogProbs, Run, compare_weights, log_probs, metrics
from nemo_fp8.mismatch.files import Folder, Recording, read_held
from nemo_fp8.mismatch.weights import reference
from nemo_fp8.rollout.refit import fingerprint

FP8 = Precision(rollout="fp8")
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, log-probs of a sound and of a broken engine, and what each holds."""
    path = tmp_path_factory.mktemp("mismatch")
    config = tiny.config("qwen3")
    weights, tokens = tiny.state_dict(config), tiny.tokens(16, 24)
    (path / "model").mkdir()
    (path / "model/config.json").write_text(json.dumps(config))
    save_file(weights, path / "model/model.safetensors")
    (path / "fp8.yaml").write_text("rollout: fp8\n")
    trainer, mask = log_probs(config, weights, tokens), torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :4] = False
    for name, held in (("sound", weights), ("broken", tiny.zeroed(weights, DOWN))):
        rollout = log_probs(config, held, tokens, Run(FP8, activations=False, dtype=torch.float16))
        save_file(
            {"trainer": trainer, "rollout": rollout, "mask": mask, "tokens": tokens}, path / f"{name}.safetensors"
        )
        told = [
            {"name": n, "kind": "fp8", "aligned": True, "fingerprints": {"whole": fingerprint(q.data, q.scale_inv)}}
            for n, q in reference(held, FP8)
        ]
        (path / f"{name}.json").write_text(json.dumps({"tensors": told}))
        codes = {k: v for n, q in reference(held, FP8) for k, v in ((n, q.data), (f"{n}_scale_inv", q.scale_inv))}
        save_file(codes, path / f"{name}_held.safetensors")
    return path


def run(*words):
    return CliRunner().invoke(app, ["mismatch", *map(str, words)], env={"COLUMNS": "80"})


def model(folder):
    return ("--model", folder / "model", "--precision", folder / "fp8.yaml", "--weights-only")


def test_metrics_of_a_file(folder):
    done = run(folder / "sound.safetensors", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    recording = Recording.read(folder / "sound.safetensors")
    assert found["metrics"] == pytest.approx(metrics(LogProbs(recording.trainer, recording.rollout, recording.mask)))
    assert (found["sequences"], found["tokens"], found["gate"], found["expected"]) == (16, 320, None, None)


@pytest.mark.parametrize("told", ["json", "_held.safetensors"])
def test_the_gate(folder, told):
    suffix = f".{told}" if told == "json" else told
    calm = run(folder / "sound.safetensors", *model(folder), "--held", folder / f"sound{suffix}")
    assert calm.exit_code == 0, calm.output
    assert "every weight that was told" in calm.output
    fires = run(folder / "broken.safetensors", *model(folder), "--held", folder / f"broken{suffix}", "--json")
    assert fires.exit_code == 1
    gate = json.loads(fires.stdout)["gate"]
    assert [(d["name"], d["kind"]) for d in gate["weights"]] == [(DOWN, "zeroed")]
    assert [check["side"] for check in gate["checks"]] == ["above", "above"]


def test_it_fits_80_columns_and_names_everything(folder):
    done = run(
        folder / "broken.safetensors", *model(folder), "--held", folder / "broken.json", "--truncate", "icepop:0.5:5"
    )
    assert done.exit_code == 1
    assert max(map(len, done.output.splitlines())) <= 80
    for word in (
        "token_mult_prob_error",
        "gen_kl_error",
        "js_divergence_error",
        "is_oob_ratio",
        "distance",
        "residual",
        DOWN,
    ):
        assert word in done.output


@pytest.mark.parametrize(
    ("options", "code"), [((), 0), (("--limit", "gen_kl_error=1e-9"), 1), (("--limit", "gen_kl_error=9"), 0)]
)
def test_limits(folder, options, code):
    assert run(folder / "sound.safetensors", *options).exit_code == code


def test_two_files_and_json_lines_are_the_same_as_one(folder, tmp_path):
    recording = Recording.read(folder / "sound.safetensors")
    expected = metrics(recording.pair())
    for side in ("trainer", "rollout"):
        save_file(
            {"log_probs": getattr(recording, side), "mask": recording.mask, "tokens": recording.tokens},
            tmp_path / f"{side}.safetensors",
        )
    assert (
        metrics(Recording.read(tmp_path / "trainer.safetensors", tmp_path / "rollout.safetensors").pair()) == expected
    )
    with (tmp_path / "nemo_rl.jsonl").open("w") as file:  # as NeMo RL writes train_data_step*.jsonl
        for t, g, m, x in zip(
            *(getattr(recording, name).tolist() for name in ("trainer", "rollout", "mask", "tokens")), strict=True
        ):
            row = {"content": "...", "token_ids": x, "token_loss_mask": [int(k) for k in m], "sample_loss_mask": 1.0}
            file.write(json.dumps(row | {"prev_logprobs": t, "generation_logprobs": g}) + "\n")
    assert metrics(Recording.read(tmp_path / "nemo_rl.jsonl").pair()) == pytest.approx(expected, rel=1e-12)
    other = recording.tokens.clone()
    other[0, 0] += 1
    save_file({"log_probs": recording.rollout, "tokens": other}, tmp_path / "other.safetensors")
    with pytest.raises(PrecisionError, match="of different tokens"):
        Recording.read(tmp_path / "trainer.safetensors", tmp_path / "other.safetensors")


def test_json_lines_of_different_lengths(tmp_path):
    rows = [
        {"trainer": [None, -1.0, -2.0], "rollout": [None, -1.5, -2.0]},
        {"trainer": [None, -1.0], "rollout": [None, -1.0]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pair = Recording.read(tmp_path / "a.jsonl").pair()
    assert pair.mask.tolist() == [[False, True, True], [False, True, False]]
    assert metrics(pair) == pytest.approx(
        metrics(LogProbs(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.5, -2.0, -1.0])))
    )
    # A gap on one side only is no padding.
    (tmp_path / "b.jsonl").write_text(json.dumps({"trainer": [-1.0, None], "rollout": [-1.0, -2.0]}))
    with pytest.raises(PrecisionError, match="trainer's log-probs are none: nan"):
        Recording.read(tmp_path / "b.jsonl").pair()


NAN = float("nan")


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ([{"log_probs": [None, -1.0, -2.0]}], [{"log_probs": [None, NAN, NAN]}]),  # a broken engine
        ([{"log_probs": [None, -1.0, -2.0]}], [{"log_probs": [None, -1.0, None]}]),  # one log-prob is not there
        ([{"log_probs": [None, -1.0, -2.0]}], [{"log_probs": [None, -1.0]}, {"log_probs": [None, -1.0, -2.0]}]),
    ],
)
def test_what_the_rollout_lacks_is_no_gap(tmp_path, trainer, rollout):
    """In two files as in one: only where neither side has a number there is no token."""
    trainer = trainer * len(rollout)
    for name, rows in (("t", trainer), ("r", rollout)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run(tmp_path / "t.jsonl", tmp_path / "r.jsonl", "--json")
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["problems"][0]["code"] == "gate-nan"
    both = [{"trainer": t["log_probs"], "rollout": r["log_probs"]} for t, r in zip(trainer, rollout, strict=True)]
    (tmp_path / "both.jsonl").write_text("\n".join(map(json.dumps, both)))
    with pytest.raises(PrecisionError, match=r"rollout's log-probs are none: nan|differ in length"):
        Recording.read(tmp_path / "both.jsonl").pair()


def test_nan_on_both_sides_is_no_gap(tmp_path):
    (tmp_path / "nan.jsonl").write_text(json.dumps({"trainer": [None, -1.0, NAN], "rollout": [None, -1.0, NAN]}))
    assert run(tmp_path / "nan.jsonl").exit_code == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        # A mask of which the first line knows nothing, or that ends before its sequence, would count other tokens.
        ([{}, {"mask": [1, 0]}], "not in every line"),
        ([{"mask": None}, {"mask": [1, 0]}], "not in every line"),
        ([{"mask": [1, 1]}, {"mask": [1]}], "sequence 2 differ in length"),
        ([{"trainer": -1.0, "rollout": -1.0}], "no list of numbers"),
    ],
)
def test_lines_that_do_not_say_the_same(tmp_path, rows, says):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"trainer": [-1.0, -2.0], "rollout": [-1.0, -9.0]} | row) for row in rows)
    )
    with pytest.raises(PrecisionError, match=says):
        Recording.read(tmp_path / "a.jsonl")


def test_samples_that_do_not_count_may_be_nan(tmp_path):
    side, broken = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0)
    broken[1] = NAN
    both = {"trainer": side, "rollout": broken, "sample_mask": torch.tensor([1, 0])}
    save_file(both, tmp_path / "a.safetensors")
    assert run(tmp_path / "a.safetensors").exit_code == 0
    save_file(both | {"mask": torch.ones(2, 4)}, tmp_path / "b.safetensors")
    assert "mask of shape (2, 4)" in str(run(tmp_path / "b.safetensors").exception)


def test_both_files_say_which_samples_count(tmp_path):
    for name, counts in (("t", [1, 1, 0]), ("r", [1, 0, 1])):
        side = {"log_probs": torch.full((3, 2), -1.0), "sample_mask": torch.tensor(counts)}
        save_file(side, tmp_path / f"{name}.safetensors")
    pair = Recording.read(tmp_path / "t.safetensors", tmp_path / "r.safetensors").pair()
    assert pair.sample_mask.tolist() == [True, False, False]


def test_a_rollout_of_nan_is_an_answer_of_no(folder, tmp_path):
    recording = Recording.read(folder / "sound.safetensors")
    save_file({"trainer": recording.trainer, "rollout": recording.rollout * float("nan")}, tmp_path / "nan.safetensors")
    done = run(tmp_path / "nan.safetensors", "--json")
    assert done.exit_code == 1
    (found,) = json.loads(done.stdout)["problems"]
    assert "NaN" in found["what"]
    assert (found["severity"], found["code"]) == ("error", "gate-nan")


POW2 = preset("bf16_with_fp8_blockwise_mixed")
CHECKPOINTS = {
    "deepseek": (POW2, "deepseek", {"experts": 2}),
    "deepseek, stacks": (POW2, "deepseek", {"experts": 2, "stacked": True}),
    "compressed-tensors": (POW2.replace(activation_scale="fp32"), "compressed-tensors", {"experts": 2}),
    "128x128": (FP8, "modelopt", {}),
    "MXFP8": (preset("bf16_with_mxfp8_mixed"), "modelopt", {"experts": 2}),
    "NVFP4": (Precision(rollout="nvfp4"), "modelopt", {"experts": 2}),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_an_export_holds_the_weights_that_it_was_made_of(tmp_path, kind):
    """In every layout: the gate may not fire on an engine that has loaded a sound checkpoint."""
    precision, layout, model = CHECKPOINTS[kind]
    source = small_models.write(tmp_path / "in", small_models.tensors(**model))
    exported = export(HuggingFace.open(source), tmp_path / "out", precision, layout=layout)
    held, wrong = read_held(tmp_path / "out"), dict(Folder(source))
    assert compare_weights(wrong, held, precision) == []
    name = sorted(exported.plan.selection.quantized)[0]
    largest = wrong[name].abs().argmax()
    wrong[name] = wrong[name].clone()
    wrong[name].view(-1)[largest] *= -1
    assert [found.where for found in compare_weights(wrong, held, precision)] == [name]


def test_the_page(folder, tmp_path):
    page = tmp_path / "page.html"
    done = run(folder / "broken.safetensors", *model(folder), "--held", folder / "broken.json", "--html", page)
    assert done.exit_code == 1, done.output
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    for word in (
        "The gate fires",
        "Log-ratios",
        "By position",
        "The tail",
        "predicted",
        "down_<wbr>" if "down_<wbr>" in text else "down_proj",
    ):
        assert word in text
    assert run(folder / "sound.safetensors", "--html", page).exit_code == 0
    assert "No band was predicted" in page.read_text()


EMULATED = ("--model", "model", "--precision", "bf16_with_fp8_blockwise_mixed")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.safetensors"], "There is no file"),
        (["sound.json"], "does not hold the log-probs"),
        (["fp8.yaml"], "neither .safetensors nor .jsonl"),
        (["sound.safetensors", "--model", "model"], "one of them is missing"),
        (["sound.safetensors", "--held", "broken.json"], "--held without --model"),
        (["sound.safetensors", "--previous", "model"], "--previous without --held"),
        (["sound.safetensors", *EMULATED, "--device", "foo"], "--device foo cannot be used"),
        (["sound.safetensors", "--truncate", "tis"], "names no bounds"),
        (["sound.safetensors", "--truncate", "clip:2"], "Unknown truncated_importance_sampling_type"),
        (["sound.safetensors", "--limit", "kl=1"], "Unknown metric to limit"),
        (["sound_held.safetensors"], "does not hold the log-probs"),
    ],
)
def test_questions_without_an_answer(folder, words, says):
    words = [str(folder / word) if (folder / word).exists() or word.startswith("missing") else word for word in words]
    done = run(*words)
    assert isinstance(done.exception, PrecisionError), done.output
    assert says in str(done.exception)


def test_a_wrong_question_has_exit_code_2(folder):
    words = [sys.executable, "-m", "nemo_fp8.cli", "mismatch", str(folder / "missing.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "There is no file" in " ".join(done.stderr.split())


def test_a_model_folder_reads_one_tensor_at_a_time(folder):
    model = Folder(folder / "model")
    weights = tiny.state_dict(tiny.config("qwen3"))
    assert set(model) == set(weights)
    assert model.shapes() == {name: tuple(t.shape) for name, t in weights.items()}
    assert all(torch.equal(model[name], t) for name, t in weights.items())
    with pytest.raises(PrecisionError, match="is an FP8 checkpoint"):
        Folder(folder / "sound_held.safetensors")
    with pytest.raises(PrecisionError, match="is no receipt"):
        read_held(folder / "model/config.json")
