"""The sections of a training run's configuration in one object, and the GPUs that they need."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pydantic import Field

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.section import LocalPath, Section
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.reward_servers import TeacherConfig, key_of
from megatron_gvpo.settings.rewards import RewardsConfig
from megatron_gvpo.settings.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from megatron_gvpo.settings.servers import EngineServers


class RunSections(Section):
    """The sections of a run. `Config`, in config.py, adds the checks of sections against each other."""

    fixed_keys = ("teacher",)
    free_keys = ("output_dir",)

    output_dir: LocalPath  # The directory that the run writes: metrics, checkpoints, the exported model.
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    # The teacher: the policy is trained on its log-probs of the policy's own responses.
    teacher: TeacherConfig | None = None
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def samples_responses(self) -> bool:
        """True if a run samples responses and scores them: to train on, or of held-out prompts."""
        return self.algorithm.samples_from_policy or self.data.eval is not None

    def model_servers(self) -> Iterator[tuple[str, EngineServers]]:
        """Yield (key, servers) of the reward models, judges and the teacher, in the order of their GPUs."""
        for i, component in enumerate(self.rewards.components):
            if component.served is not None:
                yield f"{key_of(i, component.served)}.servers", component.served.servers
        if self.teacher is not None and self.teacher.server is not None:
            yield "teacher.server", self.teacher.server

    def first_gpus(self) -> dict[str, int]:
        """Return the first GPU of each section of `model_servers`, by key.

        The trainer's ranks on this machine (LOCAL_WORLD_SIZE) and the rollout servers that the run starts
        have the GPUs before these, and colocated servers share the trainer's.
        """
        rollout, first = self.rollout, dict[str, int]()
        taken = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if rollout.uses_servers and not rollout.servers.urls:
            rollout_gpus = rollout.servers.count * rollout.servers.tp
            taken = max(taken, rollout_gpus) if rollout.servers.colocated else taken + rollout_gpus
        for key, servers in self.model_servers():
            first[key] = taken
            taken += 0 if servers.urls else servers.count * servers.tp
        return first

    def started_gpus(self) -> dict[str, int]:
        """Return the number of GPUs of the servers that the run starts itself, by the key of the servers."""
        return {key: servers.count * servers.tp for key, servers in self.model_servers() if not servers.urls}
