"""Checks a value that should be a prompt (a text, or a list of chat messages) and describes its error.

Many chat templates write a message's role without looking at it, so the roles are checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.prompt_images import is_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_EXAMPLE = '{"role": "user", "content": "..."}'


def not_a_prompt(value: Any, takes_images: bool) -> str | None:
    """The reason why `value` is neither a text nor a list of chat messages; None if it is one of them.

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
    """The reason why `message` is not a chat message, as the end of a sentence; None if it is one."""
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
    """The type and the beginning of a value, for an error."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


ROLES = ("system", "user", "assistant", "tool")  # the roles of transformers' chats
# The names of the roles in other formats (ShareGPT, Gemini, Cohere).
_MEANT = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
}


def check_roles(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise DataError, which names the message, for an unknown role, or a tool that was not called.

    `tokenizer`: its chat template writes the messages, and may know further roles; None: no template does.
    """
    check_names(messages, tokenizer)
    check_tools(messages)


def check_names(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise DataError for a role that is neither in ROLES nor in the chat template."""
    for index, message in enumerate(messages):
        check_role(message["role"], tokenizer, f"message {index} has")


def check_tools(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError for a message of a tool that follows neither the assistant's nor another tool's."""
    for index, message in enumerate(messages):
        before = messages[index - 1]["role"] if index else None
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            order = "is the first" if before is None else f"follows one of {before}"
            raise DataError(
                f"message {index} has the role 'tool' and {order}: it must follow the message of the "
                "assistant that calls the tool, or another tool's"
            )


# Fields with which OpenAI's data, axolotl's and ms-swift's leave a message out of the loss, or weigh it.
_WEIGHTS = ("weight", "train", "loss")


def unequal_weight(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence about a message of a solution that the data set does not train like the others, or None.

    `messages`: with `role`, or with ShareGPT's `from`. Here all of the assistant's are trained.
    """
    for index, message in enumerate(messages):
        speaker = str(message.get("role") or message.get("from")).lower()
        named = [name for name in _WEIGHTS if message.get(name) not in (None, 1)]
        if named and speaker in ("assistant", "gpt", "chatgpt"):
            return (
                f"message {index} has {named[0]}={message[named[0]]!r}, and all of the assistant's messages "
                "are trained alike: leave the record out, or end its prompt after that message"
            )
    return None


def check_role(role: str, tokenizer: PreTrainedTokenizerBase | None, what: str) -> None:
    """Raise DataError, which begins with `what`, for a role that is not in ROLES and not in the template."""
    named = () if tokenizer is None else _template_roles(tokenizer)
    known = dict.fromkeys((*ROLES, *named))
    if role in known:
        return
    shown = repr(role if len(role) <= 40 else f"{role[:40]}...")
    meant = _MEANT.get(role.lower()) or next(iter(get_close_matches(role.strip().lower(), known, 1)), None)
    raise DataError(
        f"{what} the role {shown}, and roles are {', '.join(known)}"
        + ("; further ones count where the chat template compares with them" if tokenizer is not None else "")
        + ("" if meant is None else f": write {meant}")
    )


def _template_roles(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    return tuple(dict.fromkeys(role for text in texts for role in compared_texts(str(text))))


@lru_cache(maxsize=64)
def compared_texts(template: str) -> tuple[str, ...]:
    """The texts with which a template compares a message's role, such as "developer" and "ipython".

    A comparison counts if one side is a field or a variable called role; so do the keys of a table in which
    the template looks a role up. The result is empty for a template that cannot be read, which fails where it
    is used.
    """
    # A command looks at the form of its data before it loads transformers, which this module does.
    from megatron_gvpo.huggingface.bounded_templates import environment

    try:
        tree = environment().parse(template)
    except TemplateError:
        return ()
    names = list[str]()
    for node in tree.find_all((nodes.Compare, nodes.Getitem)):
        if isinstance(node, nodes.Compare):
            sides = [node.expr, *(operand.expr for operand in node.ops)]
            if any(map(_is_role, sides)):
                names += [text for side in sides if not _is_role(side) for text in _texts(side)]
        elif isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Dict) and _is_role(node.arg):
            names += [text for pair in node.node.items for text in _texts(pair.key)]
    return tuple(dict.fromkeys(names))


def _is_role(node: Any) -> bool:
    """True for `message.role`, `message['role']`, or a variable that is called so."""
    match node:
        case nodes.Filter():  # message.role | lower
            return node.node is not None and _is_role(node.node)
        case nodes.Getattr():
            return node.attr == "role"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
        case nodes.Call():  # message.get("role")
            return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "role"
        case nodes.Name():
            return "role" in node.name
    return False


def _texts(node: Any) -> Iterator[str]:
    match node:
        case nodes.Const(value=str(text)):
            yield text
        case nodes.List() | nodes.Tuple():
            for item in node.items:
                yield from _texts(item)
