"""A user's own reward, shaper, estimator and loss: see docs/howto/own_method.md."""


def brevity(prompt, rollout, limit=64):
    return 1 - len(rollout.token_ids) / limit


def best_only(group, bonus=0.5):
    best = max(group.rewards)
    return [r + bonus * (r == best) for r in group.rewards]


def centred(rows, scale=1.0):
    return scale * (rows.reward_n - rows.group_mean(rows.reward_n))


def clipped(inputs, low=0.2, high=0.2):
    rows, tokens = inputs.rows, inputs.totals.tokens  # of the whole update, never len(rows)
    advantage_r = rows.token_advantages()  # reads: advantage
    ratio_r = (inputs.logp_r - rows.old_logp_r).exp()  # reads: old
    bounded_r = ratio_r.clamp(1 - low, 1 + high)
    loss_r = -(ratio_r * advantage_r).minimum(bounded_r * advantage_r)
    return loss_r.sum() / tokens, {"my_clipped": (ratio_r != bounded_r).sum() / tokens}
