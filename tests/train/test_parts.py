"""Stories and their tokenizer, each against something independent."""

import numpy as np
import torch

from nemo_fp8.experiments.corpus import Stories, story
from nemo_fp8.experiments.stories import ByteTokenizer


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
