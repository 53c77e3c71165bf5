"""Make samples of reflections and second attempts: lines 16 to 24 of algorithm 2.

The loss of a step is the mean over first attempts of what the algorithm sums for one of them: its
own policy loss and, where a second attempt was made, those of the reflection and of the second
attempt, and the internalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiential.agents.actor import ActorAgent
from experiential.config import ActorSettings, ReflectionSettings
from experiential.rollout import Episode
from experiential.training.methods.attempts import SecondAttempt, split_attempts
from experiential.training.methods.internalise import imitation_samples
from experiential.training.runtime import PolicyRuntime, Sample, sample_from_generation
from experiential.training.samples import actor_samples, trainable
from experiential.types import Turn


def reinforced_samples(episodes: Sequence[Episode], settings: ActorSettings) -> list[Sample]:
    """Make the policy-loss samples of reflections and second attempts.

    First attempts have those of `actor_samples`. Advantages are relative to the members of a group
    that are of the same kind: reflections, second attempts with a reflection, and those without one
    because it could not be read. So first attempts, which alone are on-policy with respect to what
    is deployed, are compared with first attempts only. A cell of one, or one whose rewards are all
    equal, teaches nothing. A second attempt that failed for a technical reason gives its reflection
    no reward, and no sample. ``episodes`` has the first attempts too: each sample weighs as much as
    the first attempt that it belongs to.
    """
    firsts, seconds = split_attempts(episodes)
    whole = len(trainable(firsts))
    if not whole:
        return []
    reflections: list[Episode] = []  # each an episode of one response
    for second in seconds:
        generation, reward = second.reflection.generation, second.reflection_reward
        if generation is not None and second.trajectory.error is None:
            turn = Turn(observation="", action=generation.text, reward=reward)
            said = second.trajectory.model_copy(update={"turns": (turn,), "reward": reward})
            reflections.append(Episode(said, (generation,)))
    shown = [e for e in seconds if e.reflection.block is not None]
    bare = [e for e in seconds if e.reflection.block is None]
    return [
        sample.weighted(len(trainable(kind)) / whole)
        for kind in (reflections, shown, bare)
        for sample in actor_samples(kind, settings)
    ]


async def internalised_samples(
    episodes: Sequence[Episode],
    settings: ReflectionSettings,
    agent: ActorAgent,
    policy: PolicyRuntime,
) -> list[Sample]:
    """Distil successes with a reflection (r2 > 0) into the policy without it: line 24.

    ``sft`` imitates second attempts after prompts without the reflection, L_distill = -log pi(y2 |
    x); the others are appendix A's, for which ``policy`` gives the teacher's log-probabilities.
    ``agent`` has the settings of the one that played, to rebuild prompts; its conversation is
    replaced.
    """
    firsts, seconds = split_attempts(episodes)
    better = [e for e in seconds if trainable([e]) and e.trajectory.reward > 0]
    weight = settings.weight * len(better) / max(1, len(trainable(firsts)))
    if settings.internalise == "none":
        return []
    if settings.internalise == "sft":
        return imitation_samples(better, agent, weight)
    return await distilled_samples(better, agent, policy, weight, settings.internalise)


async def distilled_samples(
    better: Sequence[SecondAttempt],
    agent: ActorAgent,
    policy: PolicyRuntime,
    weight: float,
    kind: str,
) -> list[Sample]:
    """Make samples of on-policy distillation on first attempts' tokens (appendix A).

    The teacher is the same policy, with the weights of now and the reflection in its prompt. First
    attempts share ``weight`` equally.

    The paper prints KL(pi(.|x, reflection) || pi(.|x)) inside an expectation over y ~ pi(.|x), and
    calls it reverse. ``full_forward_kl`` is that, summed over the vocabulary at each token of y;
    ``full_reverse_kl`` is the other direction, which on-policy distillation minimises, and
    ``reverse_kl`` its estimate from the drawn token alone.
    """
    pairs = [e for e in better if e.reflection.block is not None]
    samples: list[Sample] = []
    for pair in pairs:
        played = pair.first.acts()
        observations = [turn.observation for turn in pair.first.trajectory.turns]
        taught = agent.replay(observations, played, advice=pair.reflection.block)
        own = [replace(sample_from_generation(g, 0.0), kind=kind) for g in played]
        teachers = [sample_from_generation(g, 0.0) for g in taught]
        if kind == "reverse_kl":
            scores = await policy.score(teachers)
            own = [replace(s, teacher=score) for s, score in zip(own, scores, strict=True)]
        else:
            own = [replace(s, taught=teacher) for s, teacher in zip(own, teachers, strict=True)]
        total = sum(len(s.positions) for s in own)
        samples += [
            s.weighted(weight / len(pairs) * len(s.positions) / total) for s in own if s.positions
        ]
    return samples
