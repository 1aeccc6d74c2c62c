"""An ordinary agent: OpenAI's tool loop, with a calculator. Nothing in it is about training."""

from __future__ import annotations

import json
import operator
import re

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculates an operation of two whole numbers, such as 47*86.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"([0-9]{1,7})([-+*])([0-9]{1,7})")


async def solve(client: AsyncOpenAI, question: str) -> tuple[str, int]:
    """Return the agent's answer, and how often the agent used the calculator."""
    messages: list = [{"role": "user", "content": question}]
    calls = 0
    for _ in range(5):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or "", calls
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = calculate(str(arguments.get("expression")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            calls += 1
    return "", calls


def calculate(expression: str) -> str:
    if (match := EXPRESSION.fullmatch(expression)) is None:
        return "E"
    left, sign, right = match.groups()
    return str(OPERATIONS[sign](int(left), int(right)))
