"""Settings of training on rewards of generated answers (stages trl_ppo, grpo): `RolloutFields` of `training_config`."""

from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import field
from mindspeed_ms.config.values import Count, NotNegative, PositiveFloat, PositiveInt, Probability, Str, number


class RolloutFields(Section):
    """Generation of answers, rewards, and the losses of PPO and GRPO."""

    reward_function: Str | None = field(
        None,
        "GRPO and PPO: Python function that gives the rewards of answers, FILE.py:NAME.",
        "GRPO与PPO：计算回答奖励的Python函数，形如FILE.py:NAME。",
        "optimizer",
    )
    reward_model: Str | None = field(
        None,
        "GRPO and PPO: reward model that gives the rewards of answers, a checkpoint of stage orm.",
        "GRPO与PPO：计算回答奖励的奖励模型，即orm阶段的权重目录。",
        "optimizer",
    )
    num_generations: PositiveInt | None = field(
        None,
        "GRPO and PPO: answers to each prompt; with GRPO the group whose mean reward is the baseline.",
        "GRPO与PPO：每个提示生成的回答数，GRPO以组内平均奖励为基线。",
        "optimizer",
        derived="8 with stage grpo, 1 with trl_ppo",
        also=("--n-samples-per-prompt",),
    )
    rollout_batch_size: PositiveInt | None = field(
        None,
        "GRPO and PPO: answers that are generated at a time, a multiple of the global batch size; default: that size.",
        "GRPO与PPO：每次生成的回答数，须为全局批大小的倍数，默认等于全局批大小。",
        "optimizer",
    )
    ppo_epochs: PositiveInt = field(
        1, "GRPO and PPO: passes over the generated answers.", "GRPO与PPO：对生成回答的训练轮数。", "optimizer"
    )
    max_new_tokens: PositiveInt | None = field(
        None,
        "GRPO and PPO: longest answer in tokens; default: what fits into seq_length.",
        "GRPO与PPO：回答的最大token数，默认为seq_length所容。",
        "optimizer",
    )
    temperature: PositiveFloat = field(
        1.0, "GRPO and PPO: divides the logits in generation.", "GRPO与PPO：生成时的温度。", "optimizer"
    )
    top_k: Count = field(
        0,
        "GRPO and PPO: draw from the k likeliest tokens; 0: all.",
        "GRPO与PPO：生成时只取概率最高的k个，0为全部。",
        "optimizer",
    )
    top_p: number(gt=0, le=1) = field(
        1.0,
        "GRPO and PPO: draw from the likeliest tokens of this probability together.",
        "GRPO与PPO：生成时核采样的累计概率。",
        "optimizer",
    )
    missing_eos_penalty: NotNegative = field(
        0.0,
        "GRPO and PPO: subtracted from the reward of an answer without an end token.",
        "GRPO与PPO：未以结束符结尾的回答所扣的奖励。",
        "optimizer",
    )
    clip_ratio: number(gt=0, lt=1) = field(
        0.2, "GRPO and PPO: how far the probability ratio of a token is followed.", "GRPO与PPO：概率比的裁剪范围。", "optimizer"
    )
    grpo_beta: NotNegative = field(
        0.04,
        "GRPO: weight of the divergence from the starting weights (or ref_model); 0: without it.",
        "GRPO：与起始权重（或ref_model）KL散度的系数，0为不使用。",
        "optimizer",
    )
    kl_coef: NotNegative = field(
        0.3,
        "PPO: weight of the divergence from the starting weights (or ref_model) in the rewards; 0: without it.",
        "PPO：奖励中与起始权重（或ref_model）KL散度的系数，0为不使用。",
        "optimizer",
    )
    gamma: Probability = field(1.0, "PPO: discount of later rewards.", "PPO：奖励的折扣因子。", "optimizer")
    lam: Probability = field(0.95, "PPO: lambda of the advantages (GAE).", "PPO：优势估计（GAE）的lambda。", "optimizer")
    cliprange_value: PositiveFloat = field(
        0.2, "PPO: how far a value is followed from the old one.", "PPO：价值的裁剪范围。", "optimizer"
    )
    vf_coef: NotNegative = field(
        0.1, "PPO: weight of the values' loss beside the policy's.", "PPO：价值损失的系数。", "optimizer"
    )
