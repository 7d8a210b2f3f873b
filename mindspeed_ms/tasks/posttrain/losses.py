"""Losses of preferences, of plain Tensors `[n]`: one value per pair, float32. Source of the forms: MindSpeed-LLM, TRL.

z is what the log-probability ratio of the chosen answer exceeds that of the rejected one by.
"""

from mindspore import mint

from mindspeed_ms import ops


def margin_loss(margins, beta, kind="sigmoid", label_smoothing=0.0):
    """Loss of margins z.

    sigmoid: `-(1 - e) log s(beta z) - e log s(-beta z)` with label smoothing e; hinge: `max(0, 1 - beta z)`; ipo:
    `(z - 1 / (2 beta))^2`, where the margins are those of means over tokens.

    Args:
        margins (Tensor): z `[n]`.
        beta (float): weight of the margin.
        kind (str): as above.
        label_smoothing (float): e, of sigmoid.

    Raises:
        ValueError: another kind.
    """
    if kind == "sigmoid":
        scaled = margins * beta
        loss = ops.log_sigmoid(scaled) * (label_smoothing - 1.0)
        return loss - ops.log_sigmoid(-scaled) * label_smoothing if label_smoothing else loss
    if kind == "hinge":
        return mint.nn.functional.relu(1.0 - margins * beta)
    if kind == "ipo":
        return mint.square(margins - 1.0 / (2.0 * beta))
    raise ValueError(f"the loss {kind!r} is unknown: expected sigmoid, hinge or ipo.")


def kto_pair_loss(chosen, rejected, beta):
    """KTO of pairs: the mean of `1 - s(beta (chosen - KL of rejected))` and `1 - s(beta (KL of chosen - rejected))`.

    Args:
        chosen, rejected (Tensor): log-probabilities less the reference's `[n]`. The KL of either is its mean over these n, at
            least 0: it depends on the size of the micro-batch.
        beta (float): weight of the ratios.

    Returns:
        (loss `[n]`, KL of chosen, KL of rejected): scalars.
    """
    chosen_kl, rejected_kl = (mint.nn.functional.relu(mean(ratios)) for ratios in (chosen, rejected))
    better = 1.0 - mint.sigmoid((chosen - rejected_kl) * beta)
    worse = 1.0 - mint.sigmoid((chosen_kl - rejected) * beta)
    return (better + worse) * 0.5, chosen_kl, rejected_kl


def reward_loss(chosen, rejected):
    """Loss of rewards `[n]` of chosen and rejected answers: `-log s(chosen - rejected)`."""
    return -ops.log_sigmoid(chosen - rejected)


def mean(values):
    """Mean (scalar) of a Tensor `[n]`."""
    return ops.total(values) * (1.0 / values.size)
