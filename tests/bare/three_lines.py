"""Run README's three lines as ``tests/bare/run`` installs them: nothing but the core package."""

import platform
import sys
import time
from importlib.util import find_spec

import gymnasium as gym

import experiential as xp


def main() -> None:
    """Play three episodes; the third gets the advice."""
    assert not any(map(find_spec, ("torch", "transformers", "sentence_transformers", "openai")))
    start = time.perf_counter()
    reply = '<answer>[{"op": "add", "text": "The keeper of the vault leaves signs."}]</answer>'
    llm = xp.ScriptedLLM([reply])

    bank = xp.ExperienceBank(sys.argv[1])
    env = xp.ExperienceWrapper(
        gym.make("experiential/Vault-v0"), bank, extractor=xp.ExtractorAgent(llm)
    )
    env = xp.SearchAndAskWrapper(env, max_calls=2)

    for seed in range(2):
        _, info = env.reset(seed=seed, options={"world": seed})
        done = False
        while not done:
            _, _, terminated, truncated, info = env.step(info["admissible"][0])
            done = terminated or truncated
        env.get_wrapper_attr("manager").drain()
    _, info = env.reset(seed=7, options={"world": 1})
    [hit] = info["experience"]
    assert hit["text"] == "The keeper of the vault leaves signs." and hit["score"] > 0.3, hit
    assert bank.embedder.id == "sentence-transformers:all-MiniLM-L6-v2", bank.embedder.id
    env.close()
    bank.close()
    assert "torch" not in sys.modules
    print(f"{platform.python_version()}: advice found at {hit['score']:.2f} without torch", end="")
    print(f" in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
