"""How does the demo's policy speak, and how does it learn?

A small autoregressive network over digits, trained by policy gradients alone: rewards are normalised within the group
of answers to one prompt, and updates are clipped at the ratio to the old log-probabilities, so that one rollout serves
several passes. Imports torch, and is imported by the ranks' processes only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.demos.orders import Group, Rows
from muster.demos.tasks import DIGITS, LENGTH, Digits

WIDTH = 128
_RATE, _DECAY, _DECAY_SQUARES, _TINY = 1e-2, 0.9, 0.999, 1e-8
_CLIP = 0.5
_ENTROPY = 0.01
_PASSES = 8
_MINIBATCH = 192

Average = Callable[[Tensor], None]
"""Makes a tensor the mean of all ranks' tensors, in place."""


class DigitPolicy(nn.Module):
    """Says one digit after the other; sees the prompt, its place in the answer and what it said last."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.read = nn.Linear(LENGTH * DIGITS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.last = nn.Embedding(DIGITS + 1, width)
        self.think = nn.Linear(width, width)
        self.say = nn.Parameter(torch.empty(LENGTH, width, DIGITS))
        nn.init.normal_(self.say, std=width**-0.5)

    def forward(self, prompts: Tensor, place: int, last: Tensor) -> Tensor:
        """The logits of the next digit."""
        seen = self.read(functional.one_hot(prompts, DIGITS).float().flatten(-2))
        thought = functional.gelu(seen + self.places.weight[place] + self.last(last))
        thought = thought + functional.gelu(self.think(thought))
        logits: Tensor = thought @ self.say[place]
        return logits


@dataclass(frozen=True)
class Part:
    """Which of the data-parallel ranks this is."""

    rank: int = 0
    world: int = 1


# Speaking ----------------------------------------------------------------------------------------


def speak(policy: DigitPolicy, prompt: Digits, count: int, seed: int) -> Iterator[tuple[Digits, ...]]:
    """Answers to a prompt, sampled together: yields what has been said so far after each digit."""
    dice = torch.Generator().manual_seed(seed)
    asked = torch.tensor([prompt] * count)
    said = torch.full((count, 1), DIGITS)  # a digit that does not exist begins every answer
    for place in range(LENGTH):
        with torch.no_grad():
            chances = policy(asked, place, said[:, -1]).softmax(-1)
        said = torch.cat([said, torch.multinomial(chances, 1, generator=dice)], dim=1)
        yield tuple(tuple(row) for row in said[:, 1:].tolist())


# Learning ----------------------------------------------------------------------------------------


class Adam:
    """The usual one. torch's own brings in its compiler: 70 MB more, for each of a dozen processes."""

    def __init__(self, policy: DigitPolicy, steps: int = 0, moments: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.steps = steps
        self._parameters = list(policy.parameters())
        self.moments = list(moments) or [(torch.zeros_like(one), torch.zeros_like(one)) for one in self._parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        unbiased, unbiased_squares = 1 - _DECAY**self.steps, 1 - _DECAY_SQUARES**self.steps
        for parameter, gradient, (mean, squares) in zip(self._parameters, gradients, self.moments, strict=True):
            mean.lerp_(gradient, 1 - _DECAY)
            squares.mul_(_DECAY_SQUARES).addcmul_(gradient, gradient, value=1 - _DECAY_SQUARES)
            scale = squares.sqrt().div_(unbiased_squares**0.5).add_(_TINY)
            parameter.addcdiv_(mean, scale, value=-_RATE / unbiased)


def log_probs(policy: DigitPolicy, groups: Sequence[Group], part: Part) -> Rows:
    """A row per answer of this rank's part (every `world`-th): the log-probability of each of its digits."""
    prompts, answers = _tensors(groups)
    with torch.no_grad():
        spread = _spread(policy, prompts[part.rank :: part.world], answers[part.rank :: part.world])
    rows = _of_said(spread, answers[part.rank :: part.world])
    return tuple(tuple(row) for row in rows.tolist())


def learn(
    policy: DigitPolicy,
    optimiser: Adam,
    groups: Sequence[Group],
    old: Sequence[Sequence[float]],
    seed: int,
    part: Part = Part(),  # noqa: B008 - frozen
    average: Average | None = None,
) -> None:
    """Several passes over a rollout. Ranks that get the same arguments and average take the same steps."""
    prompts, answers = _tensors(groups)
    before, advantages = torch.tensor(old), _advantages(groups)
    dice = torch.Generator().manual_seed(seed)
    for _ in range(_PASSES):
        for picked in torch.split(torch.randperm(len(prompts), generator=dice), _MINIBATCH):
            mine = picked[part.rank :: part.world]
            spread = _spread(policy, prompts[mine], answers[mine])
            loss = _loss(spread, _of_said(spread, answers[mine]), before[mine], advantages[mine])
            gradients = torch.autograd.grad(loss, list(policy.parameters()))
            optimiser.step(gradients if average is None else _shared(gradients, average))


def _loss(spread: Tensor, now: Tensor, before: Tensor, advantages: Tensor) -> Tensor:
    ratio, gain = (now - before).exp(), advantages[:, None]
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - _CLIP, 1 + _CLIP) * gain)
    entropy = -(spread.exp() * spread).sum(-1)
    return -clipped.mean() - _ENTROPY * entropy.mean()


def _advantages(groups: Sequence[Group]) -> Tensor:
    """Better or worse than the other answers to the same prompt; no critic is needed."""
    rewards = torch.tensor([group.rewards for group in groups])
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages: Tensor = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    return advantages


def _spread(policy: DigitPolicy, prompts: Tensor, answers: Tensor) -> Tensor:
    """The log-probabilities of all digits at each place of each answer."""
    last = torch.cat([torch.full((len(answers), 1), DIGITS), answers[:, :-1]], dim=1)
    logits = [policy(prompts, place, last[:, place]) for place in range(LENGTH)]
    return torch.stack(logits, dim=1).log_softmax(-1)


def _of_said(spread: Tensor, answers: Tensor) -> Tensor:
    return spread.gather(-1, answers[..., None])[..., 0]


def _tensors(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    prompts = torch.tensor([group.prompt for group in groups for _ in group.answers])
    return prompts, torch.tensor([answer for group in groups for answer in group.answers])


def _shared(gradients: Sequence[Tensor], average: Average) -> list[Tensor]:
    """One message for all gradients: the network is small and the round trip is what counts."""
    flat = torch.cat([one.flatten() for one in gradients])
    average(flat)
    parts = torch.split(flat, [one.numel() for one in gradients])
    return [part.view_as(one) for part, one in zip(parts, gradients, strict=True)]


# Files -------------------------------------------------------------------------------------------


def save(policy: DigitPolicy, path: Path) -> None:
    _write({"width": policy.width, "weights": policy.state_dict()}, path)


def load(path: Path) -> DigitPolicy:
    stored = torch.load(path, weights_only=True)
    policy = DigitPolicy(stored["width"])
    policy.load_state_dict(stored["weights"])
    return policy


def save_optimiser(optimiser: Adam, path: Path) -> None:
    _write({"steps": optimiser.steps, "moments": optimiser.moments}, path)


def load_optimiser(policy: DigitPolicy, path: Path) -> Adam:
    stored = torch.load(path, weights_only=True)
    return Adam(policy, stored["steps"], stored["moments"])


def _write(content: object, path: Path) -> None:
    """A reader sees the whole file or none."""
    unfinished = path.with_suffix(".part")
    torch.save(content, unfinished)
    os.replace(unfinished, path)
