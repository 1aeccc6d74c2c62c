"""Environments of skyrl-gym and others of its form: `init(prompt)`, and `step(action)` with a dictionary.

rollout: {conversation: {environment: "megatron_gvpo.conversations.adapters.skyrl_gym:SkyRLGym",
                         options: {env_id: gsm8k_multi_turn}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gvpo.groups import Prompt
from megatron_gvpo.workers.environment import TAKEN, Reply

try:
    import skyrl_gym
    from omegaconf import OmegaConf
except ImportError:
    raise ImportError("skyrl-gym is not installed: pip install 'megatron-gvpo[skyrl-gym]'") from None


class SkyRLGym:
    """The environment `env_id`; `env_config` is its complete configuration.

    The environment gets the data record as its `extras`. A record without `reward_spec` gets one with the
    prompt's answer. Numbers in the metadata of a step become counts. A name that the run itself counts, such
    as `turns`, becomes `metadata_turns`.
    """

    def __init__(self, env_id: str, env_config: Any = None) -> None:
        self._id = env_id
        # Environments read its keys as attributes.
        self._config = OmegaConf.create(dict(env_config)) if isinstance(env_config, Mapping) else env_config

    def reset(self, prompt: Prompt, seed: int) -> None:
        extras = {"extra_info": {}, "reward_spec": {"ground_truth": prompt.answer}, **prompt.record}
        self._env = skyrl_gym.make(self._id, env_config=self._config, extras=extras)
        chat = [{"role": "user", "content": prompt.text}]
        messages, _ = self._env.init([dict(message) for message in chat])
        if messages != chat:  # the policy answers the data's prompt, not these messages
            raise ValueError(
                f"{self._id} makes a prompt of its own in place of the data's, and that is not supported: "
                "write the data with its prompt"
            )

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
