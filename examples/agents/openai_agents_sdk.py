"""An agent of the OpenAI Agents SDK that learns from its own runs, on an event loop."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
from setting import MODEL, TASK, judge, manager, report

from experiential.adapters import from_openai_agents

set_tracing_disabled(True)  # traces would go to OpenAI


async def main() -> None:
    """Run twice."""
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI())
    agent = Agent("vaults", model=model, model_settings=ModelSettings(max_tokens=24))
    with manager() as xp:
        for _ in range(2):
            async with xp.episode(TASK) as ep:  # experiential: 1
                advised = agent.clone(instructions=ep.advice)  # experiential: 2
                result = await Runner.run(advised, TASK)
                ep.extend(from_openai_agents(result))  # experiential: 3
                ep.finish(**judge(result.final_output))  # experiential: 4
            report(ep.advice, result.final_output)
            await asyncio.to_thread(xp.drain)  # so that run 2 has the lesson already


asyncio.run(main())
