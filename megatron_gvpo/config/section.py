"""Base class of all config sections, and the type of local paths."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

# A file or directory of this machine. A leading ~ is expanded here, since no shell expands it in a YAML file.
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]


class Section(BaseModel):
    """One section of a config file. Unknown keys are errors, and values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
