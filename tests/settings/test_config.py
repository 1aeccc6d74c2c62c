"""Configurations as users write them, and the errors for those that cannot run."""

import json
from pathlib import Path

import pytest
from helpers.inputs.good_config import GOOD, message

from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.pg import PolicyGradient
from megatron_gvpo.core.yaml_files import read_yaml
from megatron_gvpo.settings.config import build_config, load_config

# --- what works ---------------------------------------------------------------------------------------


def test_defaults_are_gvpo(good):
    config = load_config([good])
    assert config.optimizer.lr == 1e-5  # YAML 1.1 alone would read a string
    assert config.algorithm.loss == GVPO()
    assert config.algorithm.sampler == "engine" and config.algorithm.estimator is None


def test_later_files_and_then_overrides_win(good, tmp_path):
    second = tmp_path / "second.yaml"
    second.write_text("optimizer: {warmup_steps: 3}\nrollout: {n: 4}\ntrain: {steps: 30}\n")
    config = load_config(
        [good, second], ["rollout.n=16", "optimizer.betas=[0.9, 0.99]", "data.eval.path=e.jsonl"]
    )
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.train.steps) == (1e-5, 3, 30)
    assert config.rollout.n == 16
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.data.eval.path == "e.jsonl"


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-5", "1.0e-5", ".1e-4", "0.00001"])
def test_floats_as_people_write_them(good, text):
    assert load_config([good], [f"optimizer.lr={text}"]).optimizer.lr == pytest.approx(1e-5)


def test_tools_of_records_beside_tools_that_the_run_calls_are_refused(good):
    load_config([good], ["data.train.tools_key=tools"])
    talks = "rollout.conversation={tools: [tools.py:add]}"
    rewards = "rewards.components=[{name: right, function: 'my.py:right'}]"
    for part in ("data.train", "data.eval"):
        changes = [talks, rewards, f"{part}.path=e.jsonl", f"{part}.tools_key=tools"]
        error = message(good, *changes)
        assert f"{part}.tools_key=tools: with rollout.conversation.tools" in error


def test_words_as_people_write_them(good):
    """YAML 1.1 takes on, off, yes and no for booleans, wherever they stand."""
    config = load_config(
        [good], ["logging.progress=off", "checkpoint.asynchronous=yes", "data.shuffle=false"]
    )
    assert config.logging.progress == "off"
    assert (config.checkpoint.asynchronous, config.data.shuffle) == (True, False)
    good.write_text(GOOD + "logging: {progress: off, tensorboard: no}\n")
    assert load_config([good]).logging.progress == "off" and not load_config([good]).logging.tensorboard


def test_a_date_and_a_home_directory_are_names_of_directories(good, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config([good], ["output_dir=2026-01-31", "model.path=~/models/small"])
    assert (config.output_dir, config.model.path) == ("2026-01-31", "/home/someone/models/small")
    good.write_text(GOOD.replace("runs/x", "2026-13-31"))
    assert load_config([good]).output_dir == "2026-13-31"
    assert load_config([good], ["output_dir=~/runs"]).output_dir == "/home/someone/runs"


def test_an_override_into_a_short_form_keeps_what_it_named(good):
    good.write_text(GOOD + "algorithm: gpg\n")
    config = load_config(
        [good], ["algorithm.loss.aggregation.name=sequence_mean", "algorithm.estimator.age=token"]
    )
    assert config.algorithm.recipe == "gpg"
    assert config.algorithm.loss == PolicyGradient(aggregation="sequence_mean")
    assert config.algorithm.estimator.age == "token"
    assert config.algorithm.batch_policy.threshold == 0.6


def test_another_recipe_or_loss_replaces_the_former_with_its_keys(good):
    good.write_text(GOOD + "algorithm: {recipe: gvpo, loss: {beta: 0.3}}\n")
    assert load_config([good]).algorithm.loss == GVPO(beta=0.3)
    assert load_config([good], ["algorithm=gpg"]).algorithm.loss == PolicyGradient()
    assert load_config([good], ["algorithm.recipe=gpg"]).algorithm.loss == PolicyGradient()
    good.write_text(GOOD + "algorithm: {recipe: grpo, loss: {name: pg}}\n")
    assert load_config([good]).algorithm.loss == PolicyGradient()
    good.write_text(GOOD + "algorithm: {recipe: dr_grpo, loss: {aggregation: token_mean}}\n")
    assert load_config([good]).algorithm.loss.aggregation.constant is None


@pytest.mark.parametrize("recipe", ["gvpo", "gpg", "grpo", "dr_grpo"])
def test_a_config_survives_being_written_and_read(good, recipe):
    config = load_config([good], [f"algorithm={recipe}"])
    assert build_config(json.loads(config.model_dump_json())) == config


def test_an_ema_reference(good):
    config = load_config([good], ["algorithm.loss.reference={name: ema, decay: 0.9}"])
    assert config.algorithm.loss.reference_policies["ref"].decay == 0.9


def test_evaluation_samples_as_training_does(good):
    overrides = ["rollout={max_tokens: 48, temperature: 0.7, stop_token_ids: [5]}", "eval.sampling.top_p=0.9"]
    sampling = load_config([good], overrides).eval.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (48, 0.7, 0.9)
    assert sampling.stop_token_ids == (5,)
    assert load_config([good], [*overrides, "eval.sampling.max_tokens=9"]).eval.sampling.max_tokens == 9
    assert message(good, "rollout.temperature=-1").count("temperature") == 1  # one error, said once


# --- what does not, and what is said ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        # unknown keys, at every depth
        ("optimzer.lr=1", "optimzer: no such key; did you mean 'optimizer'?"),
        (
            "optimizer.weight_decy=1",
            "optimizer.weight_decy: no such key; did you mean 'optimizer.weight_decay'?",
        ),
        (
            "eval.sampling.temprature=1",
            "eval.sampling.temprature: no such key; did you mean 'eval.sampling.temperature'?",
        ),
        ("data.train.pth=1", "data.train.pth: no such key; did you mean 'data.train.path'?"),
        ("data.eval={path: x, splt: y}", "data.eval.splt: no such key; did you mean 'data.eval.split'?"),
        (
            "rewards.components=[{name: math, wight: 1}]",
            "rewards.components.0.wight: no such key; did you mean 'rewards.components.0.weight'?",
        ),
        ("algorithm.los=1", "algorithm.los: no such key; did you mean 'algorithm.loss'?"),
        ("algorithm.loss.bta=1", "algorithm.loss.bta: no such key; did you mean 'algorithm.loss.beta'?"),
        (
            "algorithm.loss.kl_coef=0.1",
            "algorithm.loss.kl_coef: no such key; it goes with name=disco or ppo or reg_grpo",
        ),
        (
            "algorithm.loss={name: ppo, clip_hi: 1}",
            "algorithm.loss.clip_hi: no such key; did you mean 'algorithm.loss.clip_high'?",
        ),
        (
            "algorithm.loss.reference.nme=ema",
            "algorithm.loss.reference.nme: no such key; did you mean 'algorithm.loss.reference.name'?",
        ),
        (
            "algorithm.estimator.bseline=mean",
            "algorithm.estimator.bseline: no such key; did you mean 'algorithm.estimator.baseline'?",
        ),
        (
            "train.quux=1",
            "train.quux: no such key; known: batch_epochs, deterministic, head_backend, head_stash_mb, ",
        ),
        (
            "tr\u0430in.steps=1",
            "tr\u0430in: no such key; '\u0430' in it is U+0430 (CYRILLIC SMALL",
        ),
        (
            "\u043eptimizer.lr=1",  # which looked like `optimizer.lr`, and the answer was: here it is that
            "\u043eptimizer: no such key; '\u043e' in it is U+043E (CYRILLIC SMALL",
        ),
        # unknown names
        (
            "algorithm=gpgg",
            "algorithm: there is no recipe 'gpgg'; did you mean 'gpg'?",
        ),
        ("algorithm=gpro", "algorithm: there is no recipe 'gpro'; did you mean 'grpo'?"),
        ("algorithm.loss=gvop", "algorithm.loss.name: there is no 'gvop'; did you mean 'gvpo'?"),
        (
            "algorithm.batch_policy.name=x",
            "algorithm.batch_policy.name: there is no 'x'; known: accumulate, keep_all",
        ),
        (
            "algorithm.loss.reference=fixd",
            "algorithm.loss.reference.name: Input should be 'step_start', 'fixed'",
        ),
        (
            "algorithm.loss.terms=[var, cav]",
            "algorithm.loss.terms.1: Input should be 'var' or 'cov' (given: 'cav')",
        ),
        # wrong types and values
        ("train.steps=ten", "train.steps: Input should be a valid integer"),
        ("train.steps=0", "train.steps: Input should be greater than 0 (given: 0)"),
        ("optimizer.lr=.inf", "optimizer.lr: Input should be a finite number"),
        ("optimizer.lr=", "optimizer.lr: Input should be a valid number (given: null)"),
        ("algorithm.loss.beta=-0.1", "algorithm.loss.beta: Input should be greater than 0 (given: -0.1)"),
        ("rollout.top_p=1.5", "rollout.top_p: Input should be less than or equal to 1 (given: 1.5)"),
        ("rollout=", "rollout: expected settings as `key: value`, found null"),
        (
            "data.train=train.jsonl",
            "data.train: expected settings as `key: value`, found 'train.jsonl'; did you mean "
            "data.train.path=train.jsonl?",
        ),
        (
            "data=a/b",
            "data: expected settings as `key: value`, found 'a/b'; did you mean data.train.path=",
        ),
        (
            "eval=false",
            "eval: expected settings as `key: value`, found False; to evaluate nothing, leave data.eval out",
        ),
        (
            "model.adapter=off",
            "model.adapter: expected settings as `key: value`, found 'off'; for none write model.adapter=",
        ),
        (
            "rollout.servers=none",
            "rollout.servers: expected settings as `key: value`, found 'none'; leave it out for the defaults",
        ),
        (
            "model.adapter=true",
            "model.adapter: expected settings as `key: value`, found True; its keys: alpha, path, rank,",
        ),
        ("servers={count: 2}", "servers: no such key; did you mean 'rollout.servers'?"),
        ("n=8", "n: no such key; did you mean 'eval.n' or 'rollout.n'?"),
        ("steps=8", "steps: no such key; did you mean 'train.steps'?"),
        ("tp=8", "tp: no such key; did you mean 'parallel.tp'?"),
        ("nodes=2", "nodes: no such key; did you mean 'rollout.servers.nodes'?"),
        (
            "optimizer.max_tokens_per_micro_batch=8",
            "optimizer.max_tokens_per_micro_batch: no such key; did you mean 'train.max_",
        ),
        ("parallel.dp=2", "parallel.dp: no such key; not supported: a number of data-parallel ranks; the"),
        ("rewards.components.1.name=x", "rewards.components.1: the list has no such item to change"),
        ("rewards.components=math", "rewards.components: expected a list, as [a, b], found 'math'"),
        ("nonsense", "override 'nonsense': expected key.sub=value"),
        ("train..steps=1", "override 'train..steps=1': expected key.sub=value"),
        ("output_dir=''", "output_dir: the path is empty; the current directory is `.`"),
        ("data.train.path=''", "data.train.path: "),
        ("output_dir=$RUNS/first", "output_dir: $RUNS is not expanded in a configuration: write the path"),
        ("model.path=${HOME}/models", "model.path: ${HOME} is not expanded in a configuration"),
        # impossible combinations
        ("rollout.n=1", "rollout.n=1: this algorithm compares the responses of a prompt with each other"),
        ("train.mini_batches=3", "train.mini_batches=3 does not divide train.prompts_per_step=4"),
        ("optimizer.min_lr=1", "optimizer.min_lr=1.0 exceeds optimizer.lr=1e-05"),
        ("optimizer.min_lr=1e-6", "optimizer.min_lr=1e-06 has no effect with optimizer.decay=constant"),
        (
            "rewards.components=[{name: maths}]",
            "rewards.components.0: there is no built-in reward 'maths' (there are: environment, format, ",
        ),
        (
            "rewards.components=[{name: math}, {name: math, function: x:y}]",
            "rewards: components.1: the name 'math' is given twice",
        ),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1: Input should be less than 1 (given: 1)"),
        (
            "algorithm.tracker={low: 1, high: 1}",
            "algorithm.tracker: low=1.0 must be below high=1.0",
        ),
        (
            "algorithm={recipe: dapo, shapers: {0: {buffer: 4096}}}",
            "algorithm.shapers.0.buffer=4096 exceeds the longest response, 1024 tokens: every response",
        ),
        ("logging.profile_steps=[4, 2]", "logging: profile_steps=[4, 2]: want the first step and the last"),
        (
            "algorithm=c_grpo",
            "algorithm.shapers.0 reads the reward component 'right', and rewards.components has math: add it",
        ),
        (
            "algorithm={recipe: gpg, batch_policy: {by: 1}}",
            "algorithm.batch_policy reads the reward component 1, and rewards.components has math",
        ),
        (
            "algorithm=fgrpo",
            "algorithm.estimator reads the reward component 'format', and rewards.components has math",
        ),
        ("eval.k=[8]", "eval.k=[8]: pass@k needs eval.n >= k, and eval.n=4"),
        ("parallel.sequence_parallel=true", "parallel: sequence_parallel=true needs tp >= 2"),
        ("parallel.vpp=2", "parallel: vpp=2 needs pp >= 2"),
        (
            "parallel.stage_layers=[1, 2]",
            "parallel: stage_layers=[1, 2] names 2 stages",
        ),
        (
            "parallel.overlap_param_gather=true",
            "parallel: overlap_param_gather=true needs overlap_grad_reduce",
        ),
        ("data.train.answer_key=null", "data.train.answer_key is null, but the reward 'math' compares"),
        (
            "data.eval={path: e.jsonl, answer_key: null}",
            "data.eval.answer_key is null, but the reward 'math'",
        ),
        (
            "algorithm.sampler=dataset",
            "algorithm: sampler=dataset gives one demonstration a prompt and no rewards",
        ),
        (
            "algorithm={recipe: sft, batch_policy: accumulate}",
            "algorithm: batch_policy=accumulate compares rewards",
        ),
        ("algorithm.estimator.scale=group_std", "algorithm: estimator has no effect with the loss gvpo"),
        ("algorithm.loss=pg", "algorithm: estimator is missing: the loss pg is weighed by its advantages"),
        ("algorithm={recipe: gpg, estimator: {baseline: none}}", "algorithm.estimator: baseline=none with"),
        ("algorithm.loss.reference={name: ema}", "algorithm.loss.reference: decay=None with name=ema"),
        (
            "algorithm={recipe: gpg, loss: {aggregation: {constant: 9}}}",
            "algorithm.loss.aggregation: constant=9 goes",
        ),
        (
            "algorithm={recipe: sft, loss: {aggregation: sequence_sum}}",
            "algorithm: loss.aggregation.constant is missing: sampler=dataset",
        ),
        (
            "algorithm={recipe: gpg, loss: {importance: {cap: 0.5}}}",
            "algorithm.loss.importance.cap: Input should be greater than or equal to 1 (given: 0.5)",
        ),
        (
            "algorithm.loss.importance={cap: 2}",
            "algorithm.loss: importance: the loss gvpo has no such option (its optimum is the same for ",
        ),
        ("rollout.mismatch_threshold=0", "rollout.mismatch_threshold: Input should be greater than 0"),
        (
            "algorithm={recipe: grpo, reference_logprobs: engine}",
            "algorithm: reference_logprobs=engine: the loss ppo exponentiates differences from the policy at",
        ),
        (
            "algorithm={recipe: gpg, reference_logprobs: engine}",
            "algorithm: reference_logprobs=engine: the loss pg compares with no policy: there is nothing to",
        ),
        (
            "algorithm={reference_logprobs: engine, loss: {terms: [var]}}",
            "algorithm: reference_logprobs=engine: the loss gvpo compares with no policy",
        ),
        (
            "algorithm={reference_logprobs: engine, loss: {reference: fixed}}",
            "algorithm: reference_logprobs=engine: the loss gvpo compares with another policy than the one",
        ),
    ],
)
def test_what_a_user_is_told(good, override, problem):
    text = message(good, override)
    assert text.startswith(problem)
    assert "\n" not in text and "pydantic" not in text


@pytest.mark.parametrize("recipe", ["gvpo", "gpg", "grpo", "dr_grpo"])
def test_comparing_methods_need_two_responses(good, recipe):
    assert "rollout.n >= 2" in message(good, f"algorithm={recipe}", "rollout.n=1")


@pytest.mark.parametrize(
    ("algorithm", "block"),
    [
        ("{recipe: ppo, batch_policy: accumulate}", "batch_policy=accumulate"),
        ("{recipe: reinforce_pp, batch_policy: {name: accumulate, threshold: 1.0}}", "batch_policy=accumula"),
        ("{recipe: reinforce_pp, shapers: [drop]}", "shapers: drop"),
    ],
)
def test_groups_of_one_response_never_differ_in_rewards(good, algorithm, block):
    """A step sampled twenty batches for them, and threw nineteen away."""
    problem = f"rollout.n=1: algorithm.{block}"
    assert message(good, f"algorithm={algorithm}", "rollout.n=1").startswith(problem)
    load_config([good], [f"algorithm={algorithm}", "rollout.n=2"])
    load_config(
        [good], ["algorithm={recipe: reinforce_pp, shapers: [{name: drop, which: all_right}]}", "rollout.n=1"]
    )


@pytest.mark.parametrize("recipe", ["rejection_sampling", "best_of_n"])
def test_no_batch_is_refilled_by_the_differences_that_keep_has_removed(good, recipe):
    algorithm = f"algorithm={{recipe: {recipe}, batch_policy: accumulate}}"
    assert "batch_policy=accumulate waits for groups whose rewards differ" in message(good, algorithm)
    load_config([good], ["algorithm={recipe: grpo, shapers: [keep], batch_policy: accumulate}"])


def test_one_response_is_enough_where_nothing_is_compared(good):
    overrides = ["algorithm=sft", "rollout.n=1", "data.train.demonstration_key=solution"]
    assert not load_config([good], overrides).algorithm.needs_group
    plain = "algorithm={recipe: null, loss: pg, estimator: {baseline: none}}"
    assert not load_config([good], [plain, "rollout.n=1"]).algorithm.needs_group


def test_no_recipe_keeps_the_blocks_that_files_give(good, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("algorithm: {recipe: gvpo, loss: {name: pg}, estimator: {baseline: none}}\n")
    algorithm = load_config([good, own], ["algorithm.recipe=null"]).algorithm
    assert (algorithm.loss.name, algorithm.estimator.baseline) == ("pg", "none")


def test_blocks_may_read_components_that_there_are(good):
    rewards = "rewards.components=[{name: right, function: x:y}, {name: rubric, function: x:y}]"
    assert load_config([good], ["algorithm=c_grpo", rewards]).algorithm.recipe == "c_grpo"
    assert load_config([good], ["algorithm=dapo"]).algorithm.batch_policy.by == 0
    others_hints = "{name: learned_hint, function: 'test_config:load_config'}"
    load_config(
        [good],
        [f"algorithm={{recipe: hill, members: [{others_hints}], batch_policy: {{name: accumulate, by: 0}}}}"],
    )


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (
            "{recipe: gdpo, members: [demonstration]}",
            "algorithm.members: demonstration gives responses a reward that is not in their components",
        ),
        ("{recipe: masa, estimator: {name: components}}", "algorithm.members: foresight gives responses a"),
        ("{recipe: hill, estimator: {name: components}}", "algorithm.members: learned_hint gives responses"),
        ("{recipe: arise, estimator: {name: components}}", "algorithm.members: skills gives responses a rew"),
        ("{recipe: gdpo, sampler: file}", "sampler=file gives one reward a response: use sampler=engine"),
    ],
)
def test_components_are_of_responses_that_rewards_have_judged(good, algorithm, problem):
    keys = "data.train={path: x, demonstration_key: solution, responses_key: responses}"
    text = message(good, keys, f"algorithm={algorithm}")
    assert text.startswith(f"algorithm.estimator reads components of the reward, and {problem}")


@pytest.mark.parametrize(
    ("shapers", "components", "known"),
    [
        ("[{name: overlong}]", "[{name: math}]", " with the shaper overlong are from -1 to 1"),
        ("[]", "[{name: math}, {name: format}]", " are from 0 to 2"),
        ("[{name: overlong}, {name: affine, scale: 0.5, shift: 0.5}]", "[{name: math}]", None),
        ("[{name: affine, scale: 0.5, shift: 0.5}, {name: overlong, weight: 0.5}]", "[{name: math}]", None),
        ("[{name: keep}, {name: overlong}]", "[{name: math}]", None),  # a right response keeps 0 or more
        ("[{name: overlong}]", "[{name: own, function: 'math:floor'}]", None),  # from 1 to 2, perhaps
    ],
)
def test_rewards_that_are_known_to_leave_the_range_of_bnpo(good, shapers, components, known):
    own = (f"algorithm={{recipe: bnpo, shapers: {shapers}}}", f"rewards.components={components}")
    if known is None:
        load_config([good], own)
        return
    assert message(good, *own) == (
        f"algorithm.estimator=bnpo needs rewards in [0, 1], and those of rewards.components{known}: map "
        "them by the shaper affine (scale, shift)"
    )


def test_only_pass_at_1_is_asked_for_where_k_is_empty(good):
    assert load_config([good], ["eval.k=[]"]).eval.k == ()


def test_what_the_engines_reference_needs(good):
    engine = "algorithm.reference_logprobs=engine"
    assert load_config([good], [engine]).algorithm.reference_logprobs == "engine"
    assert load_config([good], [engine, "rollout.top_p=0.95"]).rollout.wants_support
    assert message(good, engine, "train.mini_batches=1").startswith(f"train.mini_batches=1: {engine} ")
    ahead = ["rollout.engine=sglang", "rollout.async_steps=1"]  # the reference is then an older policy
    assert load_config([good], [engine, "train.mini_batches=1", *ahead]).rollout.async_steps == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["rollout={engine: sglang, top_p: 0.8}"],
            "rollout.top_p=0.8 is not possible with rollout.engine=sglang",
        ),
        (
            ["rollout={engine: sglang, min_p: 0.1, top_p: 0.9}"],
            "rollout.top_p=0.9, rollout.min_p=0.1 is not possible with rollout.engine=sglang",
        ),
        (
            ["rollout={top_k: 50}", "algorithm=opd_full", "teacher.path=m"],
            "rollout.top_k=50 is not possible with algorithm.loss.divergence=",
        ),
        (
            ["rollout={top_k: 50}", "algorithm=opd", "teacher={path: m, server: {engine: sglang}}"],
            "rollout.top_k=50 is not possible with teacher.server",
        ),
        (
            ["rollout={engine: vllm, top_k: 50, speculation: {method: ngram}}"],
            "rollout.top_k=50 is not possible with rollout.speculation.method=ngram",
        ),
        (["rollout.top_k=-1"], "rollout.top_k: all tokens are null here, not 0 or -1 as in some engines"),
        (["rollout.temperature=0"], "rollout.temperature: 0 is greedy in some engines; the lowest here is"),
        (["rollout.min_p=1"], "rollout.min_p: Input should be less than 1"),
    ],
)
def test_truncated_sampling_that_cannot_be_replayed_is_refused(good, overrides, reason):
    assert message(good, *overrides).startswith(reason)


def test_truncated_sampling_is_inherited_by_evaluation_and_dropped_for_greedy_responses(good):
    config = load_config([good], ["rollout={top_k: 50, top_p: 0.9, min_p: 0.01}"])
    assert (config.eval.sampling.top_k, config.eval.sampling.min_p) == (50, 0.01)
    assert config.rollout.wants_support
    assert not config.eval.sampling.wants_support and not config.rollout.greedy.wants_support
    assert config.rollout.greedy.top_p == 1e-6
    assert load_config([good], ["rollout={engine: sglang, top_k: 50}"]).rollout.wants_support


def test_missing_keys_and_several_errors_at_once(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("model: {path: m}\ntrain: {steps: 1, prompt_per_step: 2}\n")
    assert message(file).splitlines() == [
        "output_dir: missing, and it has no default",
        "data: missing, and it has no default",
        "train.prompts_per_step: missing, and it has no default",
        "train.prompt_per_step: no such key; did you mean 'train.prompts_per_step'?",
        "optimizer: missing, and it has no default",
    ]


def test_a_merged_mapping_can_be_merged_again(tmp_path: Path):
    """A key that overrides a merged one counted as given twice where its mapping was merged again."""
    file = tmp_path / "merged.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb:\n  c: &c {<<: *a, y: 3}\nd: {<<: *c, z: 4}\n")
    values = read_yaml(file)
    assert values["b"] == {"c": {"x": 1, "y": 3}} and values["d"] == {"x": 1, "y": 3, "z": 4}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: {path: a}\ntrain: {steps: 1}\nmodel: {path: b}\n", "key 'model' given twice"),
        ("train:\n  steps: 1\n  steps: 2\n", "key 'steps' given twice"),
        ("train: {steps: [\n", "not valid YAML"),
        ("train: {steps: 1}\n\tmodel: x\n", "not valid YAML"),
        ("- a\n- b\n", "expected `section: {key: value}`, found a list"),
        ("", "expected `section: {key: value}`, found nothing"),
        (
            "model: {path: {{ model }}}\n",
            "braces in place of a key; a placeholder such as",
        ),  # a template that nobody has filled
        ("train: {steps: !!int ''}\n", "not valid YAML"),
    ],
)
def test_files_that_are_not_a_configuration(tmp_path, text, problem):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert str(file) in message(file) and problem in message(file)


def test_a_models_own_configuration_is_not_that_of_a_run(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896}')
    assert message(file).startswith(f"{file}: it describes a model, whose directory model.path names")


def test_the_line_of_a_duplicate_key_is_named(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("train:\n  steps: 1\n  seed: 0\n  steps: 2\n")
    assert "line 4" in message(file)


def test_what_is_taken_for_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(Path("optimizer.lr")).endswith("a value is given without spaces, as optimizer.lr=VALUE")
    assert message(tmp_path).endswith("it is a directory, not a configuration file")
    assert message(Path("/dev/zero")) == "/dev/zero: it is a pipe or a device, not a configuration file"


def test_a_binary_file_and_a_missing_one(tmp_path):
    (tmp_path / "model.yaml").write_bytes(b"\x80\x02\xff\x00")
    assert "not valid YAML" in message(tmp_path / "model.yaml")
    assert message(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such configuration file"


def test_values_do_not_change_after_loading(good):
    with pytest.raises(ValueError, match="frozen"):
        load_config([good]).train.steps = 3  # type: ignore[misc]


def test_overrides_may_follow_options():
    from megatron_gvpo.cli import parse

    options = parse(["train", "a.yaml", "--nproc", "2", "parallel.tp=2", "train.steps=2"])
    assert (options.config, options.nproc) == (["a.yaml", "parallel.tp=2", "train.steps=2"], 2)
    for wrong in ("train a.yaml --nprocs 2", "train a.yaml --nproc -2", "doctor x=1"):
        with pytest.raises(SystemExit):
            parse(wrong.split())
