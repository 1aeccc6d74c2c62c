"""Has SkyPilot read a task's file, and prints what it has read; exits with 1 for a file that it refuses.

usage: check_task.py FILE, in the environment of skypilot.txt
"""

import sys

import jsonschema
import sky
import yaml
from sky.utils import schemas

with open(sys.argv[1]) as text:
    written = yaml.safe_load(text)
jsonschema.validate(written, schemas.get_task_schema())
jsonschema.validate(written["resources"], schemas.get_resources_schema())
secrets = sorted(written["secrets"])
task = sky.Task.from_yaml_config(written, secrets_overrides=[(name, "value") for name in secrets])
(resources,) = task.resources
gpus = " ".join(f"{name}:{count}" for name, count in resources.accelerators.items())
print(f"{task.num_nodes} nodes, {gpus}, secrets {' '.join(secrets)}")
