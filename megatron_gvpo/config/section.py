"""What every section of the configuration is."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

# A file or directory of this machine; ~ is the user's own, also where no shell has seen it.
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]


class Section(BaseModel):
    """One section of the file: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
