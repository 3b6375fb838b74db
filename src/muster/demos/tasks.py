"""What do the demo's pipelines learn, and how is an answer checked?

Puzzles over digits with rewards that anyone can verify. A prompt is a row of digits and the answer a row of the same
length. Nothing is learned from examples: the policy only ever sees the reward of what it said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DIGITS = 10
LENGTH = 4

Digits = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    name: str
    solve: Callable[[Sequence[int]], Digits]

    def reward(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """The share of places that are right: 1 only for the answer itself, 0.1 on average for guessing."""
        right = self.solve(prompt)
        if len(answer) != len(right):
            return 0.0
        return sum(said == wanted for said, wanted in zip(answer, right, strict=True)) / len(right)


def _reversed(prompt: Sequence[int]) -> Digits:
    return tuple(reversed(prompt))


def _complement(prompt: Sequence[int]) -> Digits:
    return tuple(DIGITS - 1 - digit for digit in prompt)


REVERSE = Task("reverse the digits", _reversed)
COMPLEMENT = Task("subtract each digit from nine", _complement)


def prompts(count: int, dice: random.Random) -> list[Digits]:
    return [tuple(dice.randrange(DIGITS) for _ in range(LENGTH)) for _ in range(count)]
