"""The three-line promise: any text environment, any agent, a bank that fills while it plays.

No model is needed: both the agent and the extractor's backend are scripts. Run it with `python
examples/three_lines.py`.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from typing import Any

import gymnasium as gym

import experiential as xp


def extractor_reply(messages: list[xp.Message]) -> str:
    """Stands for a language model that distils: writes down which lever was live."""
    text = messages[-1]["content"]
    task = re.search(r"Open the vault of [A-Za-z ]+", text)
    found = re.search(r"(\w+) was live|The (\w+) lever turns", text)
    if not task or not found:
        return '<answer>[{"op": "return"}]</answer>'
    lever = found[1] or found[2]
    return f'<answer>[{{"op": "add", "text": "{task[0]}: pull the {lever} lever."}}]</answer>'


def choose(info: dict[str, Any], experience: list[dict[str, Any]]) -> str:
    """Stands for an agent: follows the advice it was given, or guesses."""
    for hit in experience:
        lever = re.search(r"pull the (\w+) lever", hit["text"])
        if lever and hit["text"].startswith(info["task"].rstrip(".")):
            return f"pull {lever[1]}"
    return random.choice(info["admissible"])


def play(env: gym.Env[str, str], world: int, seed: int) -> float:
    """One episode in one world; returns the reward of its last step."""
    _, info = env.reset(seed=seed, options={"world": world})
    experience, reward, done = info["experience"], 0.0, False
    while not done:
        _, step_reward, terminated, truncated, info = env.step(choose(info, experience))
        reward, done = float(step_reward), terminated or truncated
    return reward


def main() -> None:
    """Visit ten worlds three times."""
    random.seed(0)
    bank = xp.ExperienceBank(tempfile.mkdtemp(), embedder="hashing")
    manager = xp.ExperienceManager(bank, xp.ExtractorAgent(xp.ScriptedLLM(extractor_reply)))
    env = xp.ExperienceWrapper(gym.make("experiential/Vault-v0"), manager)
    for visit in range(1, 4):
        wins = sum(play(env, world, seed=10 * visit + world) for world in range(10))
        manager.drain()
        sys.stdout.write(
            f"visit {visit}: {wins:.0f} of 10 vaults opened, {len(bank)} lessons in the bank\n"
        )
    env.close()
    manager.close()
    bank.close()


if __name__ == "__main__":
    main()
