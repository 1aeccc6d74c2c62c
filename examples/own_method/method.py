"""A user's own reward, shaper, estimator and loss: see docs/howto/own_method.md."""


def brevity(prompt, rollout, limit=64):
    return 1 - len(rollout.token_ids) / limit


def best_only(group, bonus=0.5):
    best = max(group.rewards)
    return [r + bonus * (r == best) for r in group.rewards]


def centred(rows, scale=1.0):
    return scale * (rows.reward_n - rows.group_mean(rows.reward_n))


def clipped_likelihood(inputs, highest=2.0):
    rows = inputs.rows
    ratio_r = (inputs.logp_r - rows.old_logp_r).exp().detach().clamp(max=highest)
    return -(ratio_r * rows.token_advantages() * inputs.logp_r).sum() / inputs.totals.tokens
