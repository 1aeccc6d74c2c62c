"""lm-eval's own definitions of the named evaluations, tried on their documents before a model is loaded."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.core.slow_work import slow_work
from megatron_gvpo.evals import programs
from megatron_gvpo.evals.catalog import ChosenEvaluations, NamedEvaluation, check_installed
from megatron_gvpo.evals.documents import Documents, Prepared, load_documents
from megatron_gvpo.evals.programs import check_sandbox

FEWSHOT_SEED = 1234  # lm-eval's default; it chooses the solved problems that a prompt shows


def prepare(choice: ChosenEvaluations) -> Prepared:
    """Read all data and try all definitions. Raises ConfigError, DataError."""
    check_installed()
    # The library logs every failed attempt without a network.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    documents = {}
    with slow_work("reading the data") as now:
        for evaluation in choice.evaluations:
            now(evaluation.dataset)
            documents[evaluation.name] = load_documents(evaluation, choice.data, choice.limit)
    if "humaneval" in documents:
        check_sandbox()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about settings that are intended here
    # The loop follows the checks above, because it loads lm-eval for seconds.
    for evaluation in choice.evaluations:
        own = documents[evaluation.name]
        check_records(evaluation, task_of(evaluation, own, chat=False), own)
    return documents


def task_of(evaluation: NamedEvaluation, documents: Documents, chat: bool) -> Any:
    """lm-eval's task. `chat`: a chat template writes the prompts. Raises DataError, ConfigError.

    The problems are prepared once: lm-eval would do it for the prompts and again for the scores, and gpqa's
    preparation shuffles the choices.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    datasets.disable_progress_bars()
    definition = read_definition(evaluation, chat)
    prepare = definition.pop("process_docs", None)
    random.seed(0)  # lm-eval's default
    splits = {}
    for split, rows in documents.items():
        try:
            data = datasets.Dataset.from_list(rows)
            splits[split] = data if prepare is None else prepare(data)
        # pyarrow raises errors for mixed types, and lm-eval's function may raise any
        except Exception as error:
            raise DataError(
                f"{evaluation.name}: lm-eval cannot read the records of {split!r}: {error}"
            ) from None
    definition["custom_dataset"] = lambda **_: splits
    for name in ("training_split", "validation_split", "fewshot_split"):
        if definition.get(name) not in splits:
            definition.pop(name, None)
    try:
        task = ConfigurableTask(config=definition)
    except Exception as error:  # lm-eval renders the first prompt here, and its functions may raise anything
        raise DataError(f"{evaluation.name}: lm-eval cannot use these records: {error!r}") from None
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return task


def check_records(evaluation: NamedEvaluation, task: Any, documents: Documents) -> None:
    """Raises DataError for records that lm-eval could not show or score, ConfigError for missing data of it.

    Otherwise such an error would appear only when the model has answered all problems.
    """
    shown = task.get_config("num_fewshot")
    if evaluation.examples is not None and len(documents[evaluation.examples]) < shown:
        raise DataError(
            f"{evaluation.name}: a prompt shows {shown} solved examples, and the split "
            f"{evaluation.examples!r} has {len(documents[evaluation.examples])} records"
        )
    if evaluation.name != "ifeval":
        return
    for number, row in enumerate(documents[evaluation.split], start=1):
        try:
            task.process_results(row, [""])
        except Exception as error:
            raise DataError(f"ifeval: problem {number}: lm-eval cannot score it: {error!r}") from None
    _check_sentences(documents[evaluation.split])


def read_definition(evaluation: NamedEvaluation, chat: bool) -> dict[str, Any]:
    """The fields of lm-eval's definition, with this package's scoring of programs."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    file = Path(lm_eval.tasks.__file__).parent / evaluation.file(chat)
    # HumanEval's functions run programs in this process, after a download: they are not even imported.
    runs_programs = evaluation.name == "humaneval"
    with redirect_stdout(StringIO()):  # ifeval's functions print that they have downloaded
        definition: dict[str, Any] = load_yaml(file, resolve_func=not runs_programs)
    definition.pop("tag", None)
    if runs_programs:
        build = programs.completed_in_block if file.stem.endswith("instruct") else programs.completed
        run = programs.verdict_filter(build)
        definition["filter_list"] = [
            {"name": "create_test", "filter": [{"function": "custom", "filter_fn": run}]}
        ]
        definition["process_results"] = programs.score
        definition["metric_list"] = [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}]
    elif evaluation.name == "math500":
        # hendrycks_math compares the text between dollar signs; aime's function does the same, but first
        # reads \boxed{}, where models that are trained to reason put their answer.
        definition["process_results"] = read_scoring("aime/aime24.yaml")
    return definition


def read_scoring(file: str) -> Any:
    """The function `process_results` of another of lm-eval's definitions."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.tasks.__file__).parent / file)["process_results"]


def _check_sentences(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if ifeval would count sentences, and the data of NLTK for it are missing."""
    import nltk

    if not any("length_constraints:number_sentences" in row["instruction_id_list"] for row in rows):
        return
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(
            "ifeval counts sentences with NLTK's punkt_tab, which is not on this machine: "
            "python -m nltk.downloader punkt_tab, or copy nltk_data from a machine that has it"
        ) from None
