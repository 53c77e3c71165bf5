"""Register text environments with Gymnasium, under ``experiential/…``, on import."""

from __future__ import annotations

import gymnasium as gym

from experiential.envs.agents import oracle, random_agent
from experiential.envs.check import check_text_env

__all__ = ["ENVS", "check_text_env", "oracle", "random_agent", "register"]

ENVS: dict[str, str] = {
    "experiential/ALFWorld-v0": "experiential.envs.alfworld.env:ALFWorldEnv",
    "experiential/BFCL-v0": "experiential.envs.bfcl.env:BFCLEnv",
    "experiential/BabyAI-v0": "experiential.envs.babyai:BabyAIEnv",
    "experiential/FrozenLake-v0": "experiential.envs.frozen_lake:FrozenLakeEnv",
    "experiential/HotpotQA-v0": "experiential.envs.hotpotqa.env:HotpotQAEnv",
    "experiential/MiniHack-v0": "experiential.envs.minihack.env:MiniHackEnv",
    "experiential/SWE-v0": "experiential.envs.swe.env:SWEEnv",
    "experiential/Sokoban-v0": "experiential.envs.sokoban:SokobanEnv",
    "experiential/Vault-v0": "experiential.envs.vault:VaultEnv",
    "experiential/WebShop-v0": "experiential.envs.webshop.env:WebShopEnv",
}
"""Environment id to entry point, which the first ``gymnasium.make`` of the id imports."""


def register() -> None:
    """Register every environment of ``ENVS`` that Gymnasium does not know yet."""
    for name, entry_point in ENVS.items():
        if name not in gym.registry:
            # its kwargs is a bare dict
            gym.register(name, entry_point=entry_point)  # pyright: ignore[reportUnknownMemberType]


register()
