"""A tool loop over the OpenAI client that learns from its own runs."""

from openai import OpenAI
from setting import MODEL, TASK, judge, manager, report

client = OpenAI()

with manager() as xp:
    for _ in range(2):
        with xp.episode(TASK) as ep:  # experiential: 1
            messages = [
                {"role": "system", "content": f"You open vaults. {ep.advice}"},  # experiential: 2
                {"role": "user", "content": TASK},
            ]
            while True:
                reply = client.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=24, tools=[ep.tool.schema]
                )
                said = reply.choices[0].message
                messages.append(said)
                if not said.tool_calls or len(messages) > 12:
                    break
                for call in said.tool_calls:
                    answer = ep.tool(call.function.arguments)  # experiential: 3
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            ep.extend(messages)  # experiential: 4
            ep.finish(**judge(said.content))  # experiential: 5
        report(ep.advice, said.content)
        xp.drain()  # so that run 2 has the lesson already; a service does not wait
