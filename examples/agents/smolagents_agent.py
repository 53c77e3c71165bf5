"""A smolagents agent that learns from its own runs."""

from setting import BASE_URL, MODEL, TASK, judge, manager, report
from smolagents import OpenAIModel, ToolCallingAgent

from experiential.adapters import from_smolagents

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key="none", max_tokens=24)

with manager() as xp:
    for _ in range(2):
        with xp.episode(TASK) as ep:  # experiential: 1
            agent = ToolCallingAgent(
                tools=[],
                model=model,
                max_steps=1,
                verbosity_level=0,
                instructions=ep.advice,  # experiential: 2
            )
            answer = agent.run(TASK)
            ep.extend(from_smolagents(agent))  # experiential: 3
            ep.finish(**judge(answer))  # experiential: 4
        report(ep.advice, answer)
        xp.drain()  # so that run 2 has the lesson already; a service does not wait
