"""Environments of skyrl-gym and others of its form: `init(prompt)`, and `step(action)` with a dictionary.

rollout: {conversation: {environment: "megatron_gvpo.conversations.adapters.skyrl_gym:SkyRLGym",
                         options: {env_id: gsm8k_multi_turn}}}
"""

from __future__ import annotations

from typing import Any

from megatron_gvpo.groups import Prompt
from megatron_gvpo.workers.environment import TAKEN, Reply

try:
    import skyrl_gym
except ImportError:
    raise ImportError("skyrl-gym is not installed: pip install 'megatron-gvpo[skyrl-gym]'") from None


class SkyRLGym:
    """The environment `env_id`; `env_config` is its configuration.

    Its `extras` are the data record. A record without `reward_spec` gets one with the prompt's answer.
    Numbers in the metadata of a step become counts. A name that the run itself counts, such as `turns`,
    becomes `metadata_turns`.
    """

    def __init__(self, env_id: str, env_config: Any = None) -> None:
        self._id, self._config = env_id, env_config

    def reset(self, prompt: Prompt, seed: int) -> None:
        extras = {"extra_info": {}, "reward_spec": {"ground_truth": prompt.answer}, **prompt.record}
        self._env = skyrl_gym.make(self._id, env_config=self._config, extras=extras)
        self._env.init([{"role": "user", "content": prompt.text}])

    def step(self, response: str) -> Reply:
        out = self._env.step(response)
        numbers = {name: n for name, n in (out.get("metadata") or {}).items() if _is_number(n)}
        counts = {f"metadata_{name}" if name in TAKEN else name: n for name, n in numbers.items()}
        messages = [{"role": m["role"], "content": m["content"]} for m in out["observations"]]
        done = out["done"] or not messages
        return Reply(None if done else messages, out["reward"], counts)

    def close(self) -> None:
        self._env.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
