"""A downstream task for `converge --evaluate examples/choose_word.py:accuracy`.

Held-out Python source, cut off before a word: which of four words of the same length comes next?
The answer is the word whose bytes the model finds least surprising. Guessing gives 0.25. The wrong
words are drawn as often as they occur in the text, so that frequency alone tells little.
"""

from __future__ import annotations

import random
import re
from typing import Any

import corpus
import torch
import torch.distributed as dist
from gpt import device_of_group

QUESTIONS, WORDS = 400, 4


def questions(text: bytes, context: int, count: int = QUESTIONS) -> list[list[bytes]]:
    """Windows of `context` + 1 bytes that differ in their last word; the first one is right."""
    words = list(re.finditer(rb"\b[A-Za-z_]\w{3,15}\b", text))
    by_length: dict[int, list[bytes]] = {}
    for word in words:
        by_length.setdefault(len(word[0]), []).append(word[0])
    asked: list[list[bytes]] = []
    draw = random.Random(0)
    while len(asked) < count:
        right = draw.choice(words)
        others = by_length[len(right[0])]
        if right.end() <= context or len(set(others)) < WORDS:
            continue
        choices = [right[0]]
        while len(choices) < WORDS:
            other = draw.choice(others)
            if other not in choices:
                choices.append(other)
        before = text[right.end() - context - 1 : right.start()]
        asked.append([before + word for word in choices])
    return asked


@torch.no_grad()
def accuracy(training: Any) -> float:
    """Share of right answers, of this rank's questions."""
    model, size = training.model.module, training.size
    text = corpus.load()[1].numpy().tobytes()
    rank, world = dist.get_rank(), dist.get_world_size()
    asked = questions(text, size.context)
    mine = asked[rank : len(asked) // world * world : world]
    return sum(_answer(model, windows) == 0 for windows in mine) / len(mine)


def _answer(model: Any, windows: list[bytes]) -> int:
    """The window of the least loss: they differ only in their last bytes."""
    losses, device = [], device_of_group()
    for window in windows:
        found = torch.frombuffer(bytearray(window), dtype=torch.uint8).to(device).long()[None]
        losses.append(model(found[:, :-1], found[:, 1:]).item())
    return losses.index(min(losses))
