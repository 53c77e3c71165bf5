"""An agent that knows the bank by the Model Context Protocol alone, as a desktop agent does."""

import asyncio
import os
import sys

from mcp import Client, StdioServerParameters
from openai import OpenAI
from setting import MODEL, TASK, judge, report

command = ["-m", "experiential.cli.main", "mcp", sys.argv[1], "--embedder", "hashing"]
server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))


async def main() -> None:
    """Run once; what was recorded waits in the bank's queue for `experiential distil`."""
    async with Client(server) as bank:  # experiential: 1
        said = (
            await bank.call_tool("recall", {"task": TASK})
        ).structured_content  # experiential: 2
        messages = [
            {"role": "system", "content": f"You open vaults. {said['advice']}"},
            {"role": "user", "content": TASK},
        ]
        reply = OpenAI().chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
        answer = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        ended = {"task": TASK, "transcript": messages, **judge(answer)}  # experiential: 3
        await bank.call_tool("record", {**ended, "episode": said["episode"]})  # experiential: 4
    report(said["advice"], answer)


asyncio.run(main())
