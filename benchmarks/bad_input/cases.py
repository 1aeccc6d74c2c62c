"""All bad inputs, by class."""

from __future__ import annotations

from bad_input.case import Case
from bad_input.checkpoints import CHECKPOINTS
from bad_input.commands import COMMANDS
from bad_input.configuration import CONFIGURATION
from bad_input.data import DATA
from bad_input.user_code import USER_CODE
from bad_input.weights import WEIGHTS

CASES: list[Case] = [*CONFIGURATION, *COMMANDS, *WEIGHTS, *DATA, *CHECKPOINTS, *USER_CODE]
