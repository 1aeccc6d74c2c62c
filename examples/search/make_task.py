"""Makes a small model with random weights, pages about people, and questions about these people.

    python examples/search/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen2's architecture (0.8 M random parameters), and DIR/data
with corpus.txt, train.jsonl and test.jsonl. A page is a line about a person:

    kalumi mother perose home tevina

The answer needs one page, or two: `home of kalumi?`, `home of mother of kalumi?`. Nobody can guess
the answer. The model calls the tool of search.py as the parser `xml` reads calls, reads the page, and gives
the result:

    <function=search><parameter=query> kalumi </parameter></function> <|end|> [kalumi mother perose ...]
    <function=search><parameter=query> perose </parameter></function> <|end|> [perose ... home lupako]
    {lupako}

A name is made of three syllables, a token each. The demonstrations are chats, of which only the model's own
messages are trained. Half of them give only a result. So the fine-tuned model often guesses, and is wrong. In
GVPO it then learns to search.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

WITH_CALLS = 0.5  # share of the demonstrations that search
SIZES = {"train": 16384, "test": 512}
PEOPLE, PLACES = 12000, 500
RELATION, ATTRIBUTE = "mother", "home"
SYLLABLES = tuple(a + b for a in "klmnprst" for b in "aeiou")
CALL, DONE = "<function=search><parameter=query>", "</parameter></function>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}[{{ message.content }}]"
    "{% elif message.role == 'assistant' %}{{ message.content }}<|end|>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)

Person = dict[str, str]  # the content of a page: {relation: the name of the other person, attribute: place}


def make_model(directory: Path, seed: int) -> None:
    words = [*SYLLABLES, RELATION, ATTRIBUTE, "of", CALL, DONE]
    tokenizer = small.small_tokenizer("?[]{}", words=words, template=TEMPLATE)
    small.save_small_model(tokenizer, directory, seed)


def make_data(directory: Path, seed: int) -> None:
    people = make_people(random.Random(seed))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "corpus.txt").write_text("".join(f"{page(people, name)}\n" for name in people))
    small.write_problems(directory, SIZES, partial(make_problem, people), seed)


def make_people(rng: random.Random) -> dict[str, Person]:
    names = ["".join(syllables) for syllables in product(SYLLABLES, repeat=3)]
    rng.shuffle(names)
    people, towns = names[:PEOPLE], names[PEOPLE : PEOPLE + PLACES]
    return {name: {RELATION: rng.choice(people), ATTRIBUTE: rng.choice(towns)} for name in people}


def page(people: dict[str, Person], name: str) -> str:
    return " ".join([name, *(f"{key} {value}" for key, value in people[name].items())])


def make_problem(people: dict[str, Person], rng: random.Random) -> small.Problem:
    name = rng.choice(list(people))
    read, question = [name], f"{ATTRIBUTE} of "
    if rng.random() < 1 / 2:
        question += f"{RELATION} of "
        read.append(people[name][RELATION])
    answer = people[read[-1]][ATTRIBUTE]
    chat = []
    for one in read if rng.random() < WITH_CALLS else ():
        chat += [says("assistant", f"{CALL}{one}{DONE}"), says("tool", page(people, one))]
    chat.append(says("assistant", f"{{{answer}}}"))
    return {"prompt": f"{question}{name}?", "answer": answer, "demonstration": chat}


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    small.make_material("Make the model, the pages and the questions.", make_model, make_data)
