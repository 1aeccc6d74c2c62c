"""All bad inputs, by class."""

from __future__ import annotations

from bad_input.case import Case
from bad_input.checkpoints import CHECKPOINTS
from bad_input.commands import COMMANDS
from bad_input.configuration import CONFIGURATION
from bad_input.contradictions import CONTRADICTIONS
from bad_input.conversations import CONVERSATIONS
from bad_input.data import DATA
from bad_input.dead_paths import PATHS
from bad_input.later_keys import LATER_KEYS
from bad_input.later_models import LATER_MODELS
from bad_input.surroundings import SURROUNDINGS
from bad_input.user_code import USER_CODE
from bad_input.weights import WEIGHTS

CASES: list[Case] = [
    *CONFIGURATION,
    *COMMANDS,
    *WEIGHTS,
    *DATA,
    *CHECKPOINTS,
    *USER_CODE,
    *LATER_KEYS,
    *LATER_MODELS,
    *CONVERSATIONS,
    *CONTRADICTIONS,
    *SURROUNDINGS,
    *PATHS,
]
