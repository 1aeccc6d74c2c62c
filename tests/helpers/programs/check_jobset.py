"""Compares a JobSet's file with the published schemas; prints what they refuse, and exits with 1.

usage: check_jobset.py FILE, in the environment of cluster_schemas.txt
"""

import sys

import kubernetes_validate
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet


def main(file: str) -> int:
    """Check the JobSet by JobSet's own models, and its Jobs and pods by Kubernetes' strict schema."""
    with open(file) as text:
        jobset = yaml.safe_load(text)
    known = JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
    problems = [f"unknown to JobSet's schema: {path}" for path in unknown(jobset, known)]
    for job in jobset["spec"]["replicatedJobs"]:
        manifest = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job["name"]},
            "spec": job["template"]["spec"],
        }
        try:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{job['name']}: {'.'.join(map(str, error.path))}: {error.message[:300]}")
    print("\n".join(problems))
    return int(bool(problems))


def unknown(written: object, known: object, path: str = "") -> list[str]:
    """The paths of the fields that are in the file and that the models did not read."""
    if isinstance(written, dict) and isinstance(known, dict):
        return [
            deeper
            for key, value in written.items()
            for deeper in (unknown(value, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"])
        ]
    if isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        pairs = enumerate(zip(written, known, strict=True))
        return [deeper for i, pair in pairs for deeper in unknown(*pair, f"{path}.{i}")]
    return [] if written == known else [f"{path}: {written!r:.80} became {known!r:.80}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
