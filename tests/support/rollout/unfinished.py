"""Pushes into engines with unfinished requests: what a Ctrl-C left in ``LLM.generate``, and loops around
``LLMEngine.step``."""

from pathlib import Path

from safetensors.torch import load_file

from nemo_fp8.rollout import Refit
from support.rollout import engines

MODES = ("wait", "abort", "keep")
PROMPT = {"prompt_token_ids": [5] * 150}  # longer than a block of the cache
TOKENS = 64


def asked():
    from vllm import SamplingParams

    return SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=5, ignore_eos=True)


def told(output):
    """Every token with its log-probability."""
    (answer,) = output.outputs
    return [(t, at[t].logprob) for t, at in zip(answer.token_ids, answer.logprobs, strict=True)]


def near(one, other):
    """The same token with almost the same log-probability: AVX-512's BF16 units, which round a batch of two otherwise
    than one, were seen 0.023 apart."""
    return one[0] == other[0] and abs(one[1] - other[1]) < 0.03


def generate(llm):
    (output,) = llm.generate(PROMPT, asked(), use_tqdm=False)
    return told(output)


def answer(llm):
    """To one request in an empty cache."""
    assert llm.reset_prefix_cache()
    return generate(llm)


def interrupt(llm, after=4):
    """A generate that Ctrl-C ends before its fifth step."""
    engine, steps = llm.llm_engine, iter(range(after))

    def step():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return type(engine).step(engine)

    engine.step = step
    try:
        generate(llm)
    except KeyboardInterrupt:
        assert engine.has_unfinished_requests()
    else:
        raise AssertionError("it was not interrupted")
    finally:
        del engine.step


def after_ctrl_c(llm, weights, fresh, running):
    """The next answer is that of a fresh engine of the new weights. What was left ends as ``running`` says."""
    Refit(llm, running="abort").push(weights[0])
    interrupt(llm)
    assert Refit(llm, running=running).push(weights[1]).require().prefix_cache_reset
    outputs = llm.generate(PROMPT, asked(), use_tqdm=False)
    *left, last = map(told, outputs)
    if running == "keep":  # what was kept is computed beside the new one, and a batch of two rounds differently
        assert near(last[0], fresh[1][0])
        assert not near(last[0], fresh[0][0])
        assert len(left) == 1
        assert left[0][:3] == fresh[0][:3]
        assert left[0] != fresh[0]
    else:
        assert outputs[-1].num_cached_tokens == 0
        assert last == fresh[1]
        assert left == ([fresh[0]] if running == "wait" else [])


def within_steps(llm, weights, fresh, running):
    """The loop gets what it asked for, and nothing hangs."""
    Refit(llm).push(weights[0])
    engine, outputs = llm.llm_engine, []
    engine.add_request("mine", PROMPT, asked())
    for _ in range(5):
        outputs += engine.step()
    Refit(llm, running=running).push(weights[1]).require()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found = told(outputs[-1])
    if running == "wait":
        assert found == fresh[0]
    elif running == "abort":
        assert found == fresh[0][: len(found)] != fresh[0]
    else:
        assert len(found) == TOKENS
        assert found[:3] == fresh[0][:3]
        assert found != fresh[0]
    assert answer(llm) == fresh[1]


def in_this_process(folder, other):
    """Both cases in all modes, with an EngineCore in the process of the test."""
    llm = engines.start(folder, apart=False, **engines.fp8())
    try:
        assert not hasattr(llm.llm_engine.engine_core, "call_utility")
        weights = [load_file(Path(path) / "model.safetensors") for path in (folder, other)]
        fresh = [answer(llm)]
        Refit(llm).push(weights[1])  # bitwise a fresh engine, as test_refit.py has it
        fresh.append(answer(llm))
        for running in MODES:
            after_ctrl_c(llm, weights, fresh, running)
            within_steps(llm, weights, fresh, running)
    finally:
        engines.stop(llm)
