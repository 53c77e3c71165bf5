"""A pydantic-ai agent that learns from its own runs."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from setting import MODEL, TASK, judge, manager, report

from experiential.adapters import from_pydantic_ai

agent = Agent(OpenAIChatModel(MODEL), model_settings={"max_tokens": 24})

with manager() as xp:
    for _ in range(2):
        with xp.episode(TASK) as ep:  # experiential: 1
            result = agent.run_sync(TASK, instructions=ep.advice)  # experiential: 2
            ep.extend(from_pydantic_ai(result.all_messages()))  # experiential: 3
            ep.finish(**judge(result.output))  # experiential: 4
        report(ep.advice, result.output)
        xp.drain()  # so that run 2 has the lesson already; a service does not wait
