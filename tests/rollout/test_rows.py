"""Weights in BF16 that are multiplied as they lie in a checkpoint: the answers are those of packed ones, and a push
writes all there is."""

import pytest
import torch
from support.rollout import engines
from support.rollout.models import weights_of
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit, engine_args
from nemo_fp8.rollout.engine import ops

ROWS = {"rollout": "compute", "unquantized": "rows"}


def places(model):
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_an_engine_answers_as_one_with_packed_weights_and_after_a_push_as_a_fresh_one(checkpoint, engine, kind):
    """Near, since the order of FP32 sums is another; and to the bit."""
    packed = engine(checkpoint(kind, 0))
    by_rows = engine(checkpoint(kind, 0), **engines.fp8(**ROWS))
    told, mine = ([engines.log_probs(llm), llm.as_started] for llm in (packed, by_rows))  # few tokens, and many
    receipt = Refit(by_rows).push(weights_of(checkpoint(kind, 1)), verify=True).require()
    assert receipt.verified
    assert {tensor.kind for tensor in receipt.tensors} == {"bfloat16"}
    answers = engines.log_probs(by_rows)
    others = (answers - mine[0]).abs().mean()
    assert all((a - b).abs().mean() < others / 50 for a, b in zip(told, mine, strict=True))
    fresh = engine(checkpoint(kind, 1), **engines.fp8(**ROWS))
    assert torch.equal(answers, engines.log_probs(fresh))


@pytest.mark.parametrize("contract", [ROWS, {"unquantized": "rows"}], ids=["in BF16", "beside FP8"])
def test_nothing_is_packed_and_nothing_moves(checkpoint, model, contract):
    """So a push has nothing to gather and nothing to pack. Without the option the head is there twice."""
    from rollout.test_reload import push

    by_rows = model("llama_tied", **contract)
    kept = [m for m in by_rows.modules() if isinstance(m, (LinearBase, VocabParallelEmbedding))]
    assert len(kept) > 4
    assert not any("cpu_linear" in vars(layer) for layer in kept)
    assert all(layer.weight.numel() for layer in kept)
    before = places(by_rows)
    session = push(by_rows, weights_of(checkpoint("llama_tied", 0)))
    assert session.tally.most_held == 0
    assert places(by_rows) == before
    assert any("cpu_linear" in vars(layer) for layer in model("llama_tied").modules())


def test_the_report_says_why(model):
    from nemo_fp8.rollout.engine.report import grid_report

    told = grid_report(model("llama_tied", **ROWS))
    assert {(layer.stored, layer.why) for layer in told.values()} == {
        ("bfloat16", "the contract generates in the compute dtype")
    }


@pytest.mark.parametrize("tokens", [1, ops.DIRECT, ops.DIRECT + 1])
@pytest.mark.parametrize("columns", [256, 40])
def test_a_product_is_right_on_either_side_of_the_kernel(tokens, columns):
    draws = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, columns, generator=draws), torch.randn(96, columns, generator=draws)
    bias = torch.randn(96, generator=draws)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    exact = x.double() @ weight.double().t() + bias.double()
    sizes = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    for shape in ((tokens, columns), (1, tokens, columns)):
        found = ops.rows_linear(x.view(shape), weight, bias)
        assert found.dtype == torch.bfloat16
        assert found.shape == (*shape[:-1], 96)
        assert ((found.double().view(tokens, 96) - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * sizes).all()


def test_arguments_name_the_plugin_for_rows_alone():
    assert "quantization" not in engine_args(Precision())
    arguments = engine_args(Precision(), unquantized="rows")
    assert arguments["quantization"] == "nemo_fp8"
    assert arguments["hf_overrides"]["quantization_config"]["unquantized"] == "rows"
    with pytest.raises(PrecisionError, match="unquantized for nemo_fp8"):
        engine_args(Precision(), unquantized="columns")
