"""Settings of post-training: `PosttrainFields` of `training_config`, `InstructionFields` of `dataset_config`."""

from mindspeed_ms.config.sections.base import Section
from mindspeed_ms.config.sections.field import LIST, SWITCH, field
from mindspeed_ms.config.sections.rollouts import RolloutFields
from mindspeed_ms.config.values import Bool, JsonMapping, NotNegative, PositiveFloat, PositiveInt, Str, StrList, number, one_of

STAGES = ("sft", "dpo", "simpo", "orm", "prm", "trl_ppo", "grpo")
PAIRWISE_STAGES = ("dpo", "simpo", "orm")
PER_TOKEN_STAGES = ("sft", "prm", "trl_ppo")
ROLLOUT_STAGES = ("trl_ppo", "grpo")  # they learn from answers that they generate
_STAGE_NAMES = {"rm": "orm", "ppo": "trl_ppo"}  # further names
_MARGIN_LOSSES = ("sigmoid", "hinge", "ipo")


class PosttrainFields(RolloutFields):
    """Stage, losses and reference of post-training."""

    stage: one_of(*STAGES, *_STAGE_NAMES) | None = field(
        None,
        "Stage of post-training: answers (sft), preferences (dpo, simpo), reward model (orm), step rewards (prm), rewards of "
        "generated answers (trl_ppo, grpo).",
        "后训练阶段：监督微调sft，偏好dpo、simpo，奖励模型orm，过程奖励prm，生成回答的奖励trl_ppo、grpo。",
        "error",
        note=("rm is orm, ppo is trl_ppo", "rm即orm，ppo即trl_ppo"),
    )
    dpo_beta: PositiveFloat = field(0.1, "DPO: weight of the log-probability ratios.", "DPO：对数概率比的系数。", "optimizer")
    dpo_loss_type: one_of(*_MARGIN_LOSSES, "kto_pair") = field("sigmoid", "DPO: loss.", "DPO：损失类型。", "optimizer")
    dpo_label_smoothing: number(ge=0, lt=0.5) = field(
        0.0, "DPO: share of pairs that are labelled wrongly.", "DPO：标签错误的比例。", "optimizer"
    )
    pref_ftx: NotNegative = field(
        0.0, "DPO: weight of the cross entropy of chosen answers.", "DPO：chosen回答交叉熵的权重。", "optimizer"
    )
    dpo_reference_free: Bool = field(
        False, "DPO: without a reference model.", "DPO：不使用参考模型。", "optimizer", form=SWITCH
    )
    ref_model: Str | None = field(
        None,
        "DPO, PPO and GRPO: checkpoint of the reference model; default: the weights that the training starts from.",
        "DPO、PPO与GRPO：参考模型的权重目录，默认为训练的起始权重。",
        "optimizer",
    )
    refer_model_iter: PositiveInt = field(
        1,
        "DPO: iteration of ref_model.",
        "DPO：ref_model的迭代数。",
        "error",
        refused=(
            "name the folder of the checkpoint itself: --ref-model FOLDER/iter_0000100",
            "请用ref_model指定该检查点目录本身",
        ),
    )
    simpo_beta: PositiveFloat = field(
        2.5, "SimPO: weight of the mean log-probabilities.", "SimPO：平均对数概率的系数。", "optimizer"
    )
    gamma_beta_ratio: NotNegative = field(1.4, "SimPO: target margin over beta.", "SimPO：目标奖励差与beta之比。", "optimizer")
    simpo_loss_type: one_of(*_MARGIN_LOSSES) = field("sigmoid", "SimPO: loss.", "SimPO：损失类型。", "optimizer")
    simpo_label_smoothing: number(ge=0, lt=0.5) = field(
        0.0, "SimPO: share of pairs that are labelled wrongly.", "SimPO：标签错误的比例。", "optimizer"
    )

    def derive(self):
        """Replace another name of a stage by its own."""
        super().derive()
        if self.stage in _STAGE_NAMES:
            self.fill(stage=_STAGE_NAMES[self.stage])
        if self.num_generations is None and self.stage in ROLLOUT_STAGES:
            self.fill(num_generations=8 if self.stage == "grpo" else 1)


class InstructionFields(Section):
    """Instruction data, and how raw records become it."""

    is_instruction_dataset: Bool = field(
        False,
        "data_path is the output prefix of preprocessing for conversations.",
        "data_path为对话数据预处理的输出前缀。",
        "data",
    )
    is_pairwise_dataset: Bool = field(
        False,
        "data_path is the output prefix of preprocessing for pairs of answers.",
        "data_path为成对回答数据预处理的输出前缀。",
        "error",
        note=("follows from the stage", "由stage决定"),
    )
    full_shuffle_instruction_dataset: Bool = field(
        False,
        "Shuffle the samples of all passes over instruction data together, not each pass by itself.",
        "对话数据的所有轮次一起打乱，而不是逐轮打乱。",
        "data",
    )
    neat_pack: Bool = field(
        False,
        "Packed conversations do not see each other: reset_attention_mask and reset_position_ids.",
        "打包的对话互不可见：即reset_attention_mask与reset_position_ids。",
        "data",
    )
    pack: Bool = field(
        False,
        "Raw conversations: fill samples of seq_length with several of them.",
        "原始对话数据：多条对话打包为seq_length长的样本。",
        "data",
    )
    handler_name: Str | None = field(
        None,
        "Raw records: what they are, a handler of preprocess_data.py; default: by their columns and the stage.",
        "原始数据的处理器（见preprocess_data.py），默认由列名与stage判断。",
        "data",
    )
    prompt_type: Str | None = field(
        None, "Raw conversations: template, as of preprocess_data.py.", "原始对话数据的模板，同preprocess_data.py。", "data"
    )
    prompt_type_path: Str | None = field(None, "Raw conversations: file of the templates.", "原始对话数据的模板文件。", "data")
    map_keys: JsonMapping | None = field(
        None, "Raw records: names of the columns, as of preprocess_data.py.", "原始数据的列名，同preprocess_data.py。", "data"
    )
    enable_thinking: Bool | None = field(
        None, "Raw conversations: thinking in templates that know it.", "原始对话数据：模板的思考模式。", "data"
    )
    append_eod: Bool = field(
        False,
        "Raw conversations: end each with the end-of-document token; for templates that end no answer.",
        "原始对话数据：在每条末尾添加文档结束token，用于不含结束符的模板。",
        "data",
    )
    placeholder_token: Str = field(
        "ки", "Process rewards: stands where a step ends.", "过程奖励：标记步骤结束的token。", "data"
    )
    reward_tokens: StrList = field(
        [],
        "Process rewards: the labels, one token each; default: all ids.",
        "过程奖励：标签token，默认为全部词表。",
        "optimizer",
        form=LIST,
    )

    def derive(self):
        """Separate conversations that are neatly packed."""
        super().derive()
        if self.neat_pack:
            self.fill(reset_attention_mask=True, reset_position_ids=True)

    @property
    def sequences_of_micro_batch(self):
        """Number of sequences in a micro-batch: two for each pair of answers."""
        return self.batch_size * (2 if self.is_pairwise_dataset else 1)
