"""Methods in which the policy has more than one role: HiLL, ARISE, MASA and M-GRPO."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.inputs.rows import make_group, make_rows, rewards_of
from test_members import Engine

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.m_grpo import RoleEstimator
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.members.arise import Skill, Skills, counterfactual_utility
from megatron_gvpo.algorithms.members.hill import LearnedHint, gives_away, hint_in, transfer_reward
from megatron_gvpo.algorithms.members.masa import Foresight, foreseen, pass_rate_reward, prediction
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.turns import Turn


class Scripted(Engine):
    """Engine that answers a prompt by the first key found in its text, and takes that key's texts in turn."""

    def __init__(self, script: dict[str, list[tuple[str, float]]], step: int = 1) -> None:
        super().__init__(step)
        self.script = script

    def ask(self, prompts: list[Prompt], n: int) -> list[Group]:
        self.prompts += [prompt.text for prompt in prompts]
        groups = []
        for prompt in prompts:
            answers = next(texts for key, texts in self.script.items() if key in prompt.text)
            rollouts = [
                Rollout([5] * max(len(text), 1), [-0.1] * max(len(text), 1), text, "stop", 3, reward=reward)
                for text, reward in (answers * n)[:n]
            ]
            groups.append(Group(prompt, rollouts))
        return groups


def test_hill_vector():
    assert transfer_reward(0.25, 8, 0.0, 0.3) == pytest.approx(0.899872, abs=1e-6)
    assert transfer_reward(0.25, 8, -0.15, 0.3) == pytest.approx(0.545800, abs=1e-6)
    assert transfer_reward(0.25, 8, 0.4, 0.3) == transfer_reward(0.25, 8, 0.0, 0.3)
    assert transfer_reward(0.0, 8, 0.0, 0.3) == transfer_reward(1.0, 8, 0.0, 0.3) == 0


def test_hill_rewards_hints_and_trains_the_best_ones_group():
    """Four hints: one is empty, one gives the answer (2) away, one leads to 1 right response of 4, one to
    none.
    """
    script = {
        "Hint: think": [("right", 1.0), ("no", 0.0), ("no", 0.0), ("no", 0.0)],
        "Hint: guess": [("no", 0.0)],
        "failed": [("", 0.0), ("it is 2", 0.0), ("think", 0.0), ("guess", 0.0)],
    }
    sampling = Scripted(script)
    failed, solved = make_group([0, 0], "p", texts=["bad", "bad"]), make_group([1, 0], "q")
    block = LearnedHint(n=4, template=" failed: {failed}")
    reasoner, hints, other = block([failed, solved], sampling)
    assert sampling.prompts[0] == "p failed: bad" and len(sampling.prompts) == 3
    assert reasoner.prompt.text == "p\n\nHint: think" and rewards_of(reasoner) == [1, 0, 0, 0]
    # The scripted policy finds a response likelier by 0.01 for every letter of the prompt.
    reliance = -0.01 * len("\n\nHint: think")
    worth = (1 - 0.25**4 - 0.75**4) * math.exp(reliance / 0.3)
    assert rewards_of(hints) == [-0.2, -0.2, pytest.approx(worth), 0.0]
    assert hints.prompt.text == "p failed: bad" and other == solved
    nothing = Scripted({"failed": [("", 0.0)]})
    original, hints = block([failed], nothing)
    assert original == failed and rewards_of(hints) == [-0.2] * 4
    with pytest.raises(ValueError, match=r"no \{hint\}"):
        LearnedHint(hint_template="none")
    with pytest.raises(ValueError, match=r"goes with \{solution\}"):
        LearnedHint(solution="solution")


def hints_of_another(groups, n, hint="think"):
    return [[hint] * (n - 1) + ["guess"] for _ in groups]


def test_hill_takes_another_models_hints_and_trains_none():
    script = {"Hint: think": [("right", 1.0), ("no", 0.0)], "Hint: guess": [("no", 0.0)]}
    sampling = Scripted(script)
    failed, solved = make_group([0, 0], "p"), make_group([1, 0], "q")
    block = LearnedHint(function="test_agents:hints_of_another", hints=2, n=2)
    reasoner, other = block([failed, solved], sampling)
    assert sampling.prompts == ["p\n\nHint: think", "p\n\nHint: guess"], "one for each hint"
    assert reasoner.prompt.text == "p\n\nHint: think" and rewards_of(reasoner) == [1, 0] and other == solved
    block = LearnedHint(function="test_agents:hints_of_another", hints=1, options={"hint": "guess"})
    assert block([failed], sampling) == [failed], "it helped nobody"
    with pytest.raises(ValueError, match="'loud'"):
        LearnedHint(function="test_agents:hints_of_another", options={"loud": True})


def test_a_hint_may_come_after_thoughts():
    assert hint_in("It is 2.\n<hint>\nthink\n</hint>") == "think" and hint_in(" think ") == "think"
    assert hint_in("<hint> </hint>") == ""


@pytest.mark.parametrize(
    ("hint", "answer", "expected"),
    [
        ("Consider 2 variables.", "2", False),
        ("It is 2.", "2", True),
        ("so x = 2", "2", True),
        ("so x = 25", "2", False),
        (r"\boxed{2}", "2", True),
        ("The answer: 12", "12", True),
        ("it exceeds 120", "120", True),
        ("Think of PARIS", "Paris", True),
        ("Think of the capital", "Paris", False),
        ("Think", " ", False),
    ],
)
def test_hill_knows_hints_that_give_the_answer_away(hint, answer, expected):
    assert gives_away(hint, answer) is expected


def test_masa_vector_and_what_cannot_be_read():
    assert pass_rate_reward(0.5, 0.25) == pytest.approx(0.316228, abs=1e-6)
    assert pass_rate_reward("much", 0.5) == pass_rate_reward(None, 0.5) == 0
    assert pass_rate_reward(True, 0.5) == pass_rate_reward(float("nan"), 0.5) == 0
    assert prediction('so {"a": 1} and {"length": 7}') == {"length": 7}
    assert prediction("none") is prediction("{broken}") is prediction('{"a": ' + "[" * 9999 + "}") is None
    endless = prediction('{"pass_rate": ' + "1" * 400 + ', "length": ' + "9" * 400 + "}")
    assert pass_rate_reward(endless["pass_rate"], 0.5) == 0
    assert foreseen(json.dumps(endless), make_group([1, 0])) == 0


def test_masa_judges_predictions_by_the_group_they_are_about():
    group = make_group([1, 1, 0, 0], lengths=[4, 9, 2, 3], texts=["carry", "carry on", "guess", "no"])
    predicted = json.dumps({"pass_rate": 0.5, "length": 6, "notions": ["Carry", "guess"]})
    assert foreseen(predicted, group) == pytest.approx((0.5 + 1 + 1) / 3)
    said_already = replace(group, prompt=replace(group.prompt, text="carry the ten"))
    assert foreseen(predicted, said_already) == pytest.approx((0 + 1 + 1) / 3), (
        "no notion that the prompt has"
    )
    counted = make_group([1, 0, 0, 0], texts=["sum", "sum", "sum", "no"])
    assert foreseen(json.dumps({"notions": ["sum", "SUM"]}), counted) == 0, "one right, and two wrong ones"
    outside = json.dumps({"pass_rate": 0.75, "length": 9, "notions": []})
    assert foreseen(outside, group) == pytest.approx(0.316228 / 3, abs=1e-6)
    assert foreseen("I do not know", group) == 0

    block = Foresight(n=2, template=" foresee")
    plain, predictions = block([group], Scripted({"foresee": [(predicted, 0.0), ("?", 1.0)]}))
    assert plain == group and predictions.prompt.text == "p foresee"
    assert rewards_of(predictions) == [pytest.approx(2.5 / 3), 0.0]


def test_arise_writes_uses_rewards_and_forgets_skills():
    block = Skills(
        n=2, after_step=1, size=1, new=1, template=" use: {skill}", summary_template=" sum: {best}"
    )
    library = block.build()
    group = make_group([1, 0], "p", texts=["did it", "no"])
    script = {"use:": [("by carrying: 4", 1.0), ("4", 1.0)], "sum:": [("carrying\nthe ten", 0.0)]}
    assert library([group], Scripted(script, step=1)) == [group], "there is no skill yet"
    assert library.skills == [Skill("carrying", "carrying\nthe ten", 0.0)]
    assert library([group], Scripted(script, step=1)) == [group], "skills are collected before their time"

    sampling = Scripted(script, step=2)
    plain, with_skill = library([group], sampling)
    assert plain == group and sampling.prompts[0] == "p use: carrying\nthe ten"
    assert rewards_of(with_skill) == [2.0, 1.0], "a bonus for the response that names its skill"
    assert library.skills[0].utility == pytest.approx(0.05), "both were right: a tenth of 0.5"

    later = block.build()
    later.load_state_dict(json.loads(json.dumps(library.state_dict())))
    assert later.skills == library.skills
    script["sum:"] = [("another\nway", 0.0)]
    later([group], Scripted(script, step=3))
    assert [skill.name for skill in later.skills] == ["carrying"], "the new one had helped less"


def test_arise_gates_and_judges():
    cases = {(True, False): 1, (True, True): 0.5, (False, False): 0, (False, True): -1}
    assert {case: counterfactual_utility(*case) for case in cases} == cases
    library = Skills(after_step=0, explore=0, gate=0.35).build()
    library.skills = [Skill(str(i), f"{i}", 0.0) for i in range(4)]  # equally likely: 0.25 each
    wrong = make_group([0], "p")
    assert library([wrong], Scripted({})) == [wrong]
    library = Skills(after_step=0, explore=1, gate=0.35).build()
    library.skills = [Skill(str(i), f"{i}", 0.0) for i in range(4)]
    assert library([wrong], Scripted({})) == [wrong], "nor is explored what no skill is likely enough for"


class Scored(Scripted):
    """Engine whose log-probs prefer skills by their one letter: the softmax is 0.2, 0.5 and 0.3."""

    def mean_logp(self, prompts, responses):
        return [math.log({"a": 0.2, "b": 0.5, "c": 0.3}[chr(ids[0])]) for ids in responses]


@pytest.mark.parametrize(("explore", "used"), [(0, {"b"}), (1, {"a", "b", "c"})])
def test_arise_takes_the_likeliest_skill_or_explores(explore, used):
    library = Skills(n=1, after_step=0, explore=explore, gate=0.35, template=" use: {skill}").build()
    library.skills = [Skill(letter, letter, 0.0) for letter in "abc"]
    sampling = Scored({"use:": [("no", 0.0)]})
    library([make_group([0], f"p{i}") for i in range(60)], sampling)
    assert len(sampling.prompts) == 60 and {prompt[-1] for prompt in sampling.prompts} == used


def role_rows():
    """Rows in which tokens 8 and 9 open and close a sub-agent; the third response has no sub-agent."""
    rows = make_rows([[1, 0, 0, 1]], lengths=[6, 5, 3, 7])
    ids = [(1, 8, 2, 9, 3, 3), (8, 9, 1, 8, 2), (1, 1, 1), (8, 2, 9, 8, 9, 8, 9)]
    return replace(rows, response_ids=ids, component_n={"local": torch.tensor([0.5, 1.0, 0.0, 0.0])})


def test_m_grpo_judges_every_role_by_itself():
    rows, block = role_rows(), RoleEstimator(open_ids=(8,), close_ids=(9,), local="local", segments=2)
    assert [[call.spans for call in block.calls(rows, row)] for row in range(4)] == [
        [[(1, 4)]],
        [[(0, 2)], [(3, 5)]],
        [],
        [[(0, 3)], [(3, 5)], [(5, 7)]],
    ]
    advantage_r, metrics = block(rows)
    main = Estimator(scale="group_std")(rows)[0].tolist()
    blended = torch.tensor([0.75, 0.5, 0.5])  # of the three that have sub-agents
    sub = ((blended - blended.mean()) / (blended.std() + 1e-6)).tolist()
    wanted = [main[0], *[sub[0]] * 3, main[0], main[0], *[sub[1]] * 2, main[1], *[sub[1]] * 2]
    wanted += [*[main[2]] * 3, *[sub[2]] * 5, 0.0, 0.0]
    assert advantage_r.tolist() == pytest.approx(wanted, abs=1e-5)
    assert metrics["sub_agent_tokens"] == pytest.approx(14 / 21)
    with pytest.raises(ValueError, match="among both"):
        RoleEstimator(open_ids=(1,), close_ids=(1,), local="local")
    with pytest.raises(ValueError, match="no reward component 'mine'"):
        RoleEstimator(open_ids=(8,), close_ids=(9,), local="mine")(rows)
    with pytest.raises(ValueError, match="local is missing"):
        RoleEstimator(open_ids=(8,), close_ids=(9,))
    with pytest.raises(ValueError, match="go together"):
        RoleEstimator(open_ids=(8,))


def test_a_loss_that_takes_one_advantage_a_response_refuses_roles():
    roles = {"name": "roles", "open_ids": [1], "close_ids": [2], "local": "local"}
    with pytest.raises(ValueError, match="gives every token an advantage"):
        AlgorithmConfig.model_validate({"recipe": "reg_grpo", "estimator": roles})


class Talking(Scripted):
    """Engine that holds conversations: the script's text is the first turn, and the environment answers."""

    def __init__(self, script: dict[str, list[tuple[str, float]]], step: int, lost: str) -> None:
        super().__init__(script, step)
        self.lost = lost

    def ask(self, prompts: list[Prompt], n: int) -> list[Group]:
        groups = super().ask(prompts, n)
        for group in groups:
            for rollout in group.rollouts:
                answer = {"role": "assistant", "content": rollout.text}
                rollout.turns = [Turn(0, reward=rollout.reward)]
                rollout.messages = [answer, {"role": "user", "content": "go on"}]
        return [replace(g, rollouts=[]) if self.lost in g.prompt.text else g for g in groups]


def test_arise_uses_and_learns_skills_in_conversations() -> None:
    block = Skills(n=2, after_step=0, gate=0, explore=0, new=2, summary_template=" sum: {best}")
    library = block.build()
    library.skills = [Skill("carry", "carry\nthe ten", 0.0)]
    groups = [make_group([1, 0], name, texts=["did it", "no"]) for name in ("p", "lost")]
    for group in groups:
        group.rollouts[0].messages = [
            {"role": "assistant", "content": "2*3"},
            {"role": "user", "content": "6"},
            {"role": "assistant", "content": "did it"},
        ]
    script = {"sum:": [("add\nup", 0.0)], "skill": [("I carry", 1.0), ("no", 0.0)]}
    sampling = Talking(script, step=1, lost="lost")
    plain, with_skill, other = library(groups, sampling)
    assert (plain, other) == (groups[0], groups[1]), "the conversations of the other skill were lost"
    assert rewards_of(with_skill) == [2.0, 0.0] and with_skill.rollouts[0].turns == [Turn(0, reward=1.0)]
    assert sampling.prompts[-2].endswith("sum: assistant: 2*3\nuser: 6\nassistant: did it")
    assert [skill.name for skill in library.skills] == ["carry", "add"], "its first turn is the skill"
