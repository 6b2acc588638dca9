"""The downstream task of examples/choose_word.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def asked(knows: bool) -> float:
    """Accuracy of a model that has read the text, or of one that is surprised at random."""
    sys.path.insert(0, EXAMPLES)
    try:
        import choose_word
        import corpus
    finally:
        sys.path.remove(EXAMPLES)
    text, draws = corpus.load()[1].numpy().tobytes(), torch.Generator().manual_seed(0)

    def model(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert tokens.shape == targets.shape == (1, 64) and tokens[0, 1] == targets[0, 0]
        if not knows:
            return torch.rand(1, generator=draws)
        window = bytes(tokens[0].tolist()) + bytes(targets[0, -1:].tolist())
        return torch.tensor(float(window not in text))

    training = SimpleNamespace(
        model=SimpleNamespace(module=model), size=SimpleNamespace(context=64)
    )
    return choose_word.accuracy(training)


def test_who_has_read_the_text_knows_the_words_and_who_guesses_a_quarter(ranks):
    assert ranks(2)(asked, True) == [1.0, 1.0]
    assert all(0.15 < share < 0.35 for share in ranks(2)(asked, False))


def test_choices_are_different_words_of_one_length_behind_one_context():
    sys.path.insert(0, EXAMPLES)
    try:
        import choose_word
    finally:
        sys.path.remove(EXAMPLES)
    text = b" ".join(b"%s = value%d + other" % (name, i) for i, name in enumerate(
        [b"alpha", b"gamma", b"delta", b"kappa", b"omega"] * 20))  # fmt: skip
    questions = choose_word.questions(text, 32, 50)
    assert len(questions) == 50 and questions == choose_word.questions(text, 32, 50)
    for right, *wrong in questions:
        assert right in text and len({right, *wrong}) == 4
        assert {len(window) for window in (right, *wrong)} == {33}
