# mypy: disable-error-code="func-returns-value"
"""Command lines and environments that cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bad_input.case import TRAIN, Case, Expected, with_text


def case(
    name: str,
    *arguments: str,
    says: tuple[str, ...] = (),
    expected: Expected = "refused",
    spoil: Callable[[Path], object] = lambda _: None,
    **environment: str,
) -> Case:
    return Case("commands", name, arguments, spoil, expected, says, environment)


PLAN = ("plan", "--model", "model", "--gpu", "h800")
SIZES = ("--gpus", "8", "--prompts", "64", "--k", "8", "--response-length", "500")
SERVE = ("serve", "run.yaml", "output_dir=run", "rollout.engine=vllm")

COMMANDS = [
    *(
        case(f"--nproc {n}", *TRAIN, "--nproc", n, says=("nproc",))
        for n in ("0", "-1", "1000000", "two", "1.5", "9" * 30)
    ),
    case("--resume --overwrite", *TRAIN, "--resume", "--overwrite", says=("--overwrite",)),
    case("an unknown option", *TRAIN, "--fast", says=("--fast",)),
    case("an unknown command", "trian", says=("trian",)),
    case("stale RANK", *TRAIN, says=("RANK",), RANK="1"),
    case("stale WORLD_SIZE", *TRAIN, says=("WORLD_SIZE",), WORLD_SIZE="4"),
    case("RANK a word", *TRAIN, says=("RANK",), RANK="first", WORLD_SIZE="1"),
    case("WORLD_SIZE a word", *TRAIN, says=("WORLD_SIZE",), WORLD_SIZE="many"),
    case(
        "RANK beyond WORLD_SIZE",
        *TRAIN,
        says=("RANK",),
        RANK="5",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29711",
    ),
    case("negative RANK", *TRAIN, says=("RANK",), RANK="-1", WORLD_SIZE="1"),
    case(
        "MASTER_PORT a word",
        *TRAIN,
        says=("MASTER_PORT",),
        MASTER_PORT="http",
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
    ),
    case(
        "MASTER_ADDR that does not resolve",
        *TRAIN,
        says=("MASTER_ADDR", "nosuch"),
        expected="either",
        MASTER_ADDR="nosuch.invalid",
        MASTER_PORT="29712",
        RANK="0",
        WORLD_SIZE="1",
    ),
    case("LOCAL_RANK a word", *TRAIN, says=("LOCAL_RANK",), expected="either", LOCAL_RANK="x"),
    case("no HOME", *TRAIN, expected="runs", HOME="/nonexistent"),
    case("TMPDIR that is not there", *TRAIN, expected="either", TMPDIR="/nonexistent"),
    case("a C locale", *TRAIN, expected="runs", LC_ALL="C", LANG="C", PYTHONUTF8="0"),
    case("convert onto itself", "convert", "model", "model", says=("model",)),
    case("convert into a full directory", "convert", "model", "data", says=("data",)),
    case("convert nothing", "convert", "nothere", "out", says=("nothere",)),
    case("convert a file", "convert", "run.yaml", "out", says=("run.yaml",)),
    case("convert to below a file", "convert", "model", "run.yaml/x", says=("run.yaml",)),
    case("convert data", "convert", "data", "out", says=("data",)),
    case("convert --like nothing", "convert", "model", "out", "--like", "nothere", says=("like", "nothere")),
    case(
        "export without a checkpoint",
        "export",
        "run.yaml",
        "output_dir=run",
        "--out",
        "o",
        says=("checkpoint", "run"),
    ),
    case(
        "export onto a file",
        "export",
        "run.yaml",
        "output_dir=run",
        "--out",
        "run.yaml",
        says=("run.yaml", "out"),
    ),
    case(
        "eval without held-out data",
        "eval",
        "run.yaml",
        "output_dir=run",
        "data.eval=null",
        says=("data.eval",),
    ),
    *(
        case(f"eval {' '.join(words)}", "eval", "run.yaml", "output_dir=run", *words, says=says)
        for words, says in (
            (("--tasks", "gsm9k"), ("gsm8k",)),
            (("--tasks", ","), ("--tasks",)),
            (("--tasks", "gsm8k", "--data", "nowhere"), ("nowhere",)),
            (("--tasks", "gsm8k", "--data", "data"), ("gsm8k/test.jsonl",)),
            (("--tasks", "gsm8k", "--limit", "0"), ("--limit",)),
            (("--tasks", "gsm8k", "model=null"), ("model",)),
            (("--json",), ("--json",)),
        )
    ),
    case(
        "eval --resume without a run",
        "eval",
        "run.yaml",
        "output_dir=run",
        "--resume",
        says=("checkpoint", "run"),
    ),
    *(
        case(f"plan {o} {v}", *PLAN, *SIZES, o, v, says=(o.strip("-"),))
        for o, v in [
            ("--gpus", "0"),
            ("--gpus", "-8"),
            ("--gpus", "1.5"),
            ("--gpus", "99999999999999"),
            ("--k", "0"),
            ("--prompts", "0"),
            ("--prompts", "x"),
            ("--response-length", "0"),
            ("--response-length", "-1"),
            ("--response-length", "a,b"),
            ("--response-length", "500,p95=100"),
            ("--response-length", "nan"),
            ("--response-length", "500,max=inf"),
            ("--response-length", "1e400"),
            ("--prompt-tokens", "-1"),
            ("--offload", "2"),
            ("--top", "0"),
            ("--recipe", "nosuch"),
            ("--gpu", "voodoo"),
            ("--async-steps", "-1"),
        ]
    ),
    case("plan of nothing", "plan", "--model", "nothere", "--gpu", "h800", *SIZES, says=("nothere",)),
    case(
        "plan of a broken config",
        *PLAN,
        *SIZES,
        says=("config.json",),
        spoil=with_text("model/config.json", "{"),
    ),
    case(
        "plan of an empty config",
        *PLAN,
        *SIZES,
        says=("config.json", "model_type"),
        spoil=with_text("model/config.json", "{}"),
    ),
    case("recipes show nothing", "recipes", "show", "nosuch", says=("nosuch",)),
    case("recipes show without a name", "recipes", "show", says=("name of one recipe",)),
    case(
        "doctor --directory nowhere",
        "doctor",
        "--directory",
        "/nonexistent/x",
        says=("directory",),
        expected="either",
    ),
    case(
        "slurm --nodes 0", "slurm", "run.yaml", "output_dir=run", "--nodes", "0", "--dry-run", says=("nodes",)
    ),
    case(
        "slurm --nodes -2",
        "slurm",
        "run.yaml",
        "output_dir=run",
        "--nodes",
        "-2",
        "--dry-run",
        says=("nodes",),
    ),
    case(
        "slurm with an option of rubbish",
        "slurm",
        "run.yaml",
        "output_dir=run",
        "--nodes",
        "1",
        "--sbatch=x\ny",
        "--no-gpus",
        "--dry-run",
        says=("sbatch",),
    ),
    case(
        "slurm --dry-run beside an earlier run",
        "slurm",
        "run.yaml",
        "output_dir=run",
        "--nodes",
        "1",
        "--ranks-per-node",
        "1",
        "--no-gpus",
        "--dry-run",
        expected="runs",
        spoil=lambda t: ((t / "run").mkdir(), (t / "run/metrics.jsonl").write_text("")),
    ),
    case("serve without servers", "serve", "run.yaml", "output_dir=run", says=("engine",)),
    case("serve on all addresses without a key", *SERVE, "rollout.servers.host=0.0.0.0", says=("key",)),
    case(
        "serve on a host that is not here",
        *SERVE,
        "rollout.servers.host=192.0.2.1",
        "rollout.servers.start_timeout=20",
        says=("host", "192.0.2.1"),
    ),
    case(
        "serve with a python that is not there",
        *SERVE,
        "rollout.servers.python=/nonexistent/python",
        says=("python",),
    ),
    case(
        "servers that nobody runs",
        *TRAIN,
        "rollout.engine=vllm",
        "rollout.servers.urls=['http://127.0.0.1:9']",
        "rollout.servers.start_timeout=5",
        says=("127.0.0.1:9",),
    ),
    case(
        "servers of a name that does not resolve",
        *TRAIN,
        "rollout.engine=sglang",
        "rollout.servers.urls=['http://nosuch.invalid:80']",
        "rollout.servers.start_timeout=5",
        says=("nosuch.invalid",),
    ),
    case(
        "a key that is not set",
        *TRAIN,
        "rollout.engine=vllm",
        "rollout.servers.urls=['http://127.0.0.1:9']",
        "rollout.servers.api_key_env=NO_SUCH_KEY",
        says=("NO_SUCH_KEY",),
    ),
    case(
        "a wandb project without an account",
        *TRAIN,
        "logging.wandb_project=x",
        says=("wandb", "Weights"),
        expected="either",
    ),
]
