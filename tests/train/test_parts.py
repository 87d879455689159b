"""Adam, norms and stories, each against something independent."""

import types

import numpy as np
import pytest
import torch
from nemo_fp8.train.adam import FusedAdam
from nemo_fp8.train.norm import Norm

from nemo_fp8.errors import PrecisionError
from nemo_fp8.train.data import ByteTokenizer, Stories, story


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_step_by_step(decoupled):
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7)]
    mine, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    a, b = FusedAdam(mine, adam_w_mode=decoupled, **settings), kind(theirs, **settings)
    for _ in range(5):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step(), b.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_adam_resumes_to_the_bit_and_counts_steps_once_a_group():
    def run(optimizer, params, steps):
        for i in steps:
            for p in params:
                p.grad = torch.full_like(p, 0.1 * (i + 1))
            optimizer.step()

    straight = [torch.ones(4), torch.ones(2)]
    a = FusedAdam(straight, 1e-2, (0.9, 0.99), 1e-8, 0.0)
    run(a, straight, range(6))
    resumed = [torch.ones(4), torch.ones(2)]
    b = FusedAdam(resumed, 1e-2, (0.9, 0.99), 1e-8, 0.0)
    run(b, resumed, range(3))
    c = FusedAdam(resumed, 1e-2, (0.9, 0.99), 1e-8, 0.0)
    c.load_state_dict(b.state_dict())
    run(c, resumed, range(3, 6))
    assert c.param_groups[0]["step"] == 6
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


def config(**changes):
    fields = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": True, "params_dtype": torch.float32}
    return types.SimpleNamespace(**fields | changes)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_are_their_formulas(kind, centred):
    torch.manual_seed(0)
    norm = Norm(config(normalization=kind, layernorm_zero_centered_gamma=centred), 64, eps=1e-3)
    x, gain = torch.randn(3, 5, 64), torch.randn(64)
    norm.weight.data.copy_(gain - 1 if centred else gain)
    y = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    expected = y / (y.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * gain
    torch.testing.assert_close(norm(x), expected)


def test_norms_mark_their_parameters_for_sequence_parallelism():
    for flag in (True, False):
        assert {p.sequence_parallel for p in Norm(config(normalization="LayerNorm", sequence_parallel=flag), 8).parameters()} == {flag}
    with pytest.raises(PrecisionError, match="L2Norm"):
        Norm(config(normalization="L2Norm"), 8)


def test_stories_add_up():
    rng = np.random.default_rng(0)
    for _ in range(200):
        first, *events, last = story(rng).split(". ")
        have = number(first)
        for event in events:
            more = "more" in event or "finds" in event
            have += number(event) if more else -number(event)
            assert have >= 0
        assert number(last) == have


def number(sentence):
    (n,) = [int(word) for word in sentence.replace(".", "").split() if word.isdigit()]
    return n


def test_samples_follow_from_seed_and_index_and_splits_differ():
    a, b, other = Stories("train", 10, 64, 1), Stories("train", 10, 64, 1), Stories("validation", 10, 64, 1)
    assert torch.equal(a[3]["tokens"], b[3]["tokens"])
    assert not torch.equal(a[3]["tokens"], a[4]["tokens"])
    assert not torch.equal(a[3]["tokens"], other[3]["tokens"])
    assert torch.equal(a[3]["tokens"][1:], a[3]["labels"][:-1])
    batch = a.collate_fn([a[0], a[1]])
    assert batch["tokens"].shape == (2, 64)
    assert torch.equal(batch["attention_mask"][0, 0], torch.ones(64, 64).tril() == 0)


def test_the_tokenizer_turns_text_round():
    tokenizer, text = ByteTokenizer(), "Anna has 3 äpples."
    assert tokenizer.ids_to_text(tokenizer.text_to_ids(text)) == text
    assert tokenizer.tokens_to_text(tokenizer.text_to_tokens(text)) == text
    assert tokenizer.ids_to_tokens(tokenizer.tokens_to_ids(["a", "b"])) == ["a", "b"]
    assert max(tokenizer.text_to_ids(text)) < tokenizer.vocab_size
