"""Says what is wrong with a value that should be a prompt: a text, or a list of chat messages."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.data.prompt_images import is_part

_EXAMPLE = '{"role": "user", "content": "..."}'


def not_a_prompt(value: Any, takes_images: bool) -> str | None:
    """Why `value` is neither a text nor a list of chat messages; None if it is one of them.

    `takes_images`: the model does, so that the content of a message may be a list of parts.
    """
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not value:
        return (
            f"the prompt is neither a string nor a list of chat messages like {_EXAMPLE} but "
            f"{shown_value(value)}"
        )
    for index, message in enumerate(value):
        if (problem := not_a_message(message, takes_images)) is not None:
            return f"message {index} of the prompt {problem}"
    return None


def not_a_message(message: Any, takes_images: bool) -> str | None:
    """Why `message` is not a chat message, as the end of a sentence about it; None if it is one."""
    if not isinstance(message, dict):
        return f"is {shown_value(message)}, and a message is like {_EXAMPLE}"
    if not isinstance(message.get("role"), str):
        return f"has no role as text; fields there: {', '.join(map(str, message)) or 'none'}"
    content = message.get("content")
    if isinstance(content, str):
        return None
    if takes_images and isinstance(content, list):
        wrong = [part for part in content if not is_part(part)]
        return None if not wrong else f"has a part that is neither text nor an image: {shown_value(wrong[0])}"
    if isinstance(content, list):
        return (
            f"has a list as its content ({shown_value(content)}), and a model without images takes a text: "
            "join the texts of its parts (data.train.convert names a function that does)"
        )
    return f"has no text as its content but {shown_value(content)}"


def shown_value(value: Any) -> str:
    """Type and beginning of a value, for an error."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
