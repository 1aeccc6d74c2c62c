"""Games of textarena for one player.

    python -m megatron_gvpo.conversations.adapters.textarena FrozenLake-v0 games.jsonl --games 1000

writes the data: a line for each game, with its first observation as the prompt. Then:

    rollout: {conversation: {environment: "megatron_gvpo.conversations.adapters.textarena:TextArena"}}
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.named_file import check_named_file, write_named_file
from megatron_gvpo.groups import Prompt
from megatron_gvpo.workers.environment import Reply

try:
    import textarena
except ImportError:
    raise ImportError("textarena is not installed: pip install 'megatron-gvpo[textarena]'") from None


class TextArena:
    """The game that the data record names by `game` and `game_seed`. Its reward comes at the end."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._game, self._random, shown = begin(prompt.record["game"], prompt.record["game_seed"])
        if shown.strip() not in prompt.text:  # many chat templates strip messages
            raise ValueError(
                f"the prompt is not what game {prompt.record['game']} with seed {prompt.record['game_seed']} "
                "shows: make the data again with this version of textarena"
            )

    def step(self, response: str) -> Reply:
        with _own_random(self._random):
            done, _ = self._game.step(response)
            if not done:
                return Reply(_new(self._game))
            rewards, info = self._game.close()
        return Reply(None, rewards[0], {"invalid_move": info[0]["invalid_move"]})


def begin(name: str, seed: int) -> tuple[Any, list[Any], str]:
    """Return (the game, the state of its random numbers, its first text)."""
    game, state = textarena.make(f"{name}-raw"), [random.getstate()]
    with _own_random(state):
        game.reset(num_players=1, seed=seed)
        return game, state, _new(game)


def _new(game: Any) -> str:
    """The texts that the game has shown since the last call, without the player's own."""
    _, messages = game.get_observation()
    return "\n".join(text for source, text, _ in messages if source == textarena.GAME_ID)


@contextmanager
def _own_random(state: list[Any]) -> Iterator[None]:
    """Context in which a game has its own random numbers. Games share Python's global generator."""
    before = random.getstate()
    random.setstate(state[0])
    try:
        yield
    finally:
        state[0] = random.getstate()
        random.setstate(before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the data of a textarena game for one player.")
    parser.add_argument("game", help="such as FrozenLake-v0")
    parser.add_argument("file", type=Path)
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first game; each later one adds 1")
    options = parser.parse_args()
    target = (options.file, str(options.file), "a new file", None)
    try:
        check_named_file(*target)
        if options.games < 1:
            raise ConfigError(f"--games {options.games}: want 1 or more")
        lines = []
        for seed in range(options.seed, options.seed + options.games):
            _, _, shown = begin(options.game, seed)
            record = {"prompt": shown, "answer": "", "game": options.game, "game_seed": seed}
            lines.append(json.dumps(record) + "\n")
        write_named_file(*target, "".join(lines))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
