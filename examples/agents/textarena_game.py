"""A game of TextArena, played by a model that learns from its own runs."""

from openai import OpenAI
from setting import MODEL, manager, report

import experiential
from experiential.adapters import TextArenaEnv

client = OpenAI()


def act(observation: str) -> str:
    """Ask the model for a move."""
    messages = [{"role": "user", "content": observation}]
    reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
    return reply.choices[0].message.content


with manager() as xp:
    # experiential: 1
    env = experiential.ExperienceWrapper(TextArenaEnv("GuessTheNumber-v0"), xp)
    for seed in range(2):
        observation, info = env.reset(seed=seed)
        shown, done = info["experience"], False
        while not done:
            observation, _, terminated, truncated, info = env.step(act(observation))
            done = terminated or truncated
        report(" ".join(entry["text"] for entry in shown), observation)
        xp.drain()  # so that run 2 has the lesson already; a service does not wait
