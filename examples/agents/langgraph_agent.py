"""A LangGraph agent that learns from its own runs."""

from langchain.agents import create_agent
from langchain_core.messages import convert_to_openai_messages
from langchain_openai import ChatOpenAI
from setting import MODEL, TASK, judge, manager, report

agent = create_agent(ChatOpenAI(model=MODEL, max_tokens=24, use_responses_api=False), tools=[])

with manager() as xp:
    for _ in range(2):
        with xp.episode(TASK) as ep:  # experiential: 1
            question = {"role": "user", "content": f"{ep.advice}{TASK}"}  # experiential: 2
            state = agent.invoke({"messages": [question]})
            answer = state["messages"][-1].content
            ep.extend(convert_to_openai_messages(state["messages"]))  # experiential: 3
            ep.finish(**judge(answer))  # experiential: 4
        report(ep.advice, answer)
        xp.drain()  # so that run 2 has the lesson already; a service does not wait
