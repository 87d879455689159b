"""The gate on real vLLM: calm where the engine holds the trainer's weights, and firing, with names, where it does not.

Faults get into the workers as they would in a run: by a push of what a broken trainer, mapping or loader makes of the
weights.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.rollout.engines import fp8

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.mismatch import Gate, LogProbs, compare_weights, kind_of, predict
from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.mismatch.weights import told_by
from nemo_fp8.numerics import quantize

CONTRACT = Precision(rollout="fp8")
LAYER = "model.layers.2."
GATE, UP, DOWN = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
TOKENS = torch.randint(0, 480, (24, 40), generator=torch.Generator().manual_seed(5))


def log_probs(llm, tokens=TOKENS):
    """The engine's log-prob of every token; 0 for the first one."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    answers = llm.generate([{"prompt_token_ids": row} for row in tokens.tolist()], asked, use_tqdm=False)
    rows = [
        [0.0, *(place[t].logprob for place, t in zip(a.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True))]
        for a in answers
    ]
    return torch.tensor(rows)


class Rollout:
    """An engine, its trainer's weights, and what emulation predicts of both."""

    def __init__(self, folder, llm, activations):
        self.llm = llm
        self.weights = load_file(f"{folder}/model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.prediction = predict(self.config, self.weights, TOKENS, CONTRACT, activations=activations)

    def push(self, weights, **options):
        from nemo_fp8.rollout import Refit

        return Refit(self.llm).push(weights, **options)

    def judge(self, **told):
        pair = LogProbs(self.prediction.trainer, log_probs(self.llm), self.prediction.mask)
        return Gate().judge(self.prediction, pair, TOKENS, weights=self.weights, held=read_back(self.llm), **told)


@pytest.fixture(scope="module")
def dense(checkpoint, engine):
    folder = checkpoint("qwen3")
    return Rollout(folder, engine(folder, **fp8()), activations=False)


def test_calm_as_loaded_and_after_a_push(dense):
    for receipt in (None, dense.push(dense.weights)):
        verdict = dense.judge()
        assert not verdict.fired, verdict
        assert [check.side for check in verdict.checks] == ["inside", "inside"]
        assert verdict.differences == ()
        if receipt is not None:  # the receipt tells the same as the workers' memory
            assert compare_weights(dense.weights, told_by(receipt), CONTRACT) == []
            assert told_by(receipt) == read_back(dense.llm)


def test_the_page_s_snippets(dense):
    page = (Path(__file__).parents[2] / "docs/mismatch.md").read_text()
    snippets = re.findall(r"^```python rollout\n(.*?)^```", page, re.M | re.S)
    assert snippets
    receipt = dense.push(dense.weights)
    pair = LogProbs(dense.prediction.trainer, log_probs(dense.llm), dense.prediction.mask)
    given = {"llm": dense.llm, "receipt": receipt, "Gate": Gate, "prediction": dense.prediction, "pair": pair}
    for snippet in snippets:
        exec(compile(snippet, "mismatch.md", "exec"), given | {"tokens": TOKENS, "weights": dense.weights})


def test_scales_of_one_layer_zeroed(dense):
    """verl#7224: the load reported success, and all scales were zero."""
    q = quantize(dense.weights[DOWN], Operand("e4m3", (128, 128), "fp32"))
    receipt = dense.push(dense.weights | {DOWN: q.data, f"{DOWN}_scale_inv": torch.zeros_like(q.scale_inv)})
    assert not receipt.ok
    verdict = dense.judge()
    assert verdict.left
    assert [check.side for check in verdict.checks] == ["above", "above"]
    assert verdict.layers == (DOWN,)
    assert kind_of(verdict.differences[0]) == "zeroed"
    dense.push(dense.weights)
    assert not dense.judge().fired


def test_gate_and_up_swapped(dense):
    dense.push(dense.weights | {GATE: dense.weights[UP], UP: dense.weights[GATE]})
    verdict = dense.judge()
    assert verdict.left
    assert [(d.where, kind_of(d), d.why) for d in verdict.differences] == [
        (GATE, "swapped", f"It holds {UP}."),
        (UP, "swapped", f"It holds {GATE}."),
    ]


def test_one_layer_stale_after_a_small_step(dense):
    """A step of 1%: less than FP8's noise, seen by the residual, and named."""
    g = torch.Generator().manual_seed(3)
    before = {
        name: (t.float() + 0.01 * t.float().std() * torch.randn(t.shape, generator=g)).bfloat16() if t.dim() == 2 else t
        for name, t in dense.weights.items()
    }
    dense.push(dense.weights | {name: t for name, t in before.items() if name.startswith(LAYER)})
    verdict = dense.judge(previous=before)
    assert [check.side for check in verdict.checks] == ["inside", "above"]
    assert {kind_of(d) for d in verdict.differences} == {"stale"}
    assert set(verdict.layers) == {name for name in dense.weights if name.startswith(LAYER) and "_proj" in name}


def test_other_scales_in_one_layer_are_a_warning(dense):
    q = quantize(dense.weights[DOWN], Operand("e4m3", (128, 128), "pow2"))
    dense.push(dense.weights | {DOWN: q.data, f"{DOWN}_scale_inv": q.scale_inv})
    verdict = dense.judge()
    assert [(d.where, kind_of(d), d.severity) for d in verdict.differences] == [(DOWN, "scales", "warning")]
    assert not verdict.fired, verdict
    assert {found.severity for found in verdict.findings} == {"warning"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "emulated"), [("qwen3", True), ("qwen3_moe", False), ("qwen3_moe", True), ("llama_tied", False)]
)
def test_calm_on_other_models_and_with_quantized_activations(checkpoint, engine, kind, emulated):
    folder = checkpoint(kind)
    rollout = Rollout(folder, engine(folder, **fp8(**({"activations": "emulated"} if emulated else {}))), emulated)
    verdict = rollout.judge()
    assert not verdict.fired, verdict
    assert verdict.differences == ()
    broken = next(name for name in rollout.weights if "layers.1" in name and name.endswith("o_proj.weight"))
    rollout.push(rollout.weights | {broken: torch.zeros_like(rollout.weights[broken])})
    verdict = rollout.judge()
    assert verdict.left
    assert verdict.layers == (broken,)
    rollout.push(rollout.weights)
