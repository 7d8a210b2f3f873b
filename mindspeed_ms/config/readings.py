"""Decided readings where the guide, Megatron and upstream differ or are silent: (subject, decision, Chinese)."""

READINGS = (
    (
        "defaults",
        (
            "Megatron arguments and Namespaces start from Megatron's defaults, yaml and the trio from the "
            "guide's; with --config the "
            "guide's hold and only typed flags lie above, because a file says what its author saw."
        ),
        "Megatron参数和Namespace以Megatron默认值为准，yaml与三文件以指南默认值为准；使用--config时以指南为准，只有键入的参数覆盖。",
    ),
    (
        "compute_dtype",
        ("unset, it is params_dtype: the guide says float16, upstream's code float32; neither should change a model silently."),
        "未设置时等于params_dtype：指南写float16、上游代码为float32，都不应悄悄改变模型。",
    ),
    (
        "bf16 / fp16",
        (
            "they set compute_dtype, and params_dtype unless that is given: float32 parameters with bf16 "
            "computation are possible "
            "(the trio asks for them)."
        ),
        "它们设定compute_dtype，并在未给出params_dtype时设定之；允许float32参数配bf16计算（三文件即如此）。",
    ),
    (
        "no_load_rng, no_load_optim",
        ("default False: resuming continues the run exactly. Upstream writes True for no_load_rng and loads all the same."),
        "默认False：续训精确延续。上游no_load_rng写作True但仍会加载。",
    ),
    (
        "position_embedding_type: absolute",
        "learned absolute positions; upstream's code adds none for this name.",
        "可学习绝对位置；上游代码对该名称不加位置编码。",
    ),
    (
        "ckpt_format",
        "unset, and Megatron's names, are our own format; ckpt and safetensors are upstream's.",
        "不设置或为Megatron的名称时采用本框架格式；ckpt与safetensors为上游格式。",
    ),
    (
        "override_opt_param_scheduler",
        "contradicts use_checkpoint_opt_param_scheduler only if both were set: the latter's default gives way.",
        "仅当两者都被设置时与use_checkpoint_opt_param_scheduler冲突，否则后者的默认值让位。",
    ),
    (
        "hysteresis",
        "Megatron's meaning; the factor of growth and backoff is loss_scale_factor. The guide maps one to the other.",
        "采用Megatron的含义；增大与减小的倍数是loss_scale_factor。指南将二者混为一谈。",
    ),
    (
        "clip_grad",
        "a number, or {grad_clip_type, clip_value}; training_config.grad_clip_kwargs is the same setting.",
        "可为数值或{grad_clip_type, clip_value}；training_config.grad_clip_kwargs是同一设置。",
    ),
    (
        "accumulate_allreduce_grads_in_fp32",
        (
            "False sums gradients in the parameter's type, with a notice for bf16. Megatron arguments with "
            "--bf16 set it to "
            "True, as Megatron does."
        ),
        "False时按参数类型累加梯度，bf16下给出提示；Megatron参数加--bf16时与Megatron一样为True。",
    ),
    (
        "num_layer_list",
        (
            "rows are stages, columns chunks: [[4, 4], [4, 2]] puts 8 layers on stage 0 and 6 on stage 1. "
            "Upstream reads rows as chunks; "
            "num_layer_list_order: vpp_pp selects that, recompute lists follow, and a square list that differs "
            "is announced."
        ),
        (
            "行为流水线级、列为虚拟块：[[4, 4], [4, 2]]表示第0级8层、第1级6层。上游以行为块，可用"
            "num_layer_list_order: vpp_pp选择，重计算列表随之；方阵且两种读法不同时会提示。"
        ),
    ),
    (
        "kv_group_size",
        "the number of key/value groups: tp 8 divides 8, not 48 / 8 = 6.",
        "键值组的个数：tp 8整除8而不整除48/8=6。",
    ),
    (
        "padded_size, divided_by",
        "an explicit padded_size needs divisibility by tp only; divided_by * tp serves to compute a padding.",
        "显式的padded_size只需被tp整除；divided_by乘tp用于计算填充。",
    ),
    (
        "num_query_groups",
        (
            "has an effect with group_query_attention only; set alone to another number than the heads it is an "
            "error. null is one "
            "group per head."
        ),
        "只在group_query_attention下有效；单独设置且不等于头数时报错。null表示每头一组。",
    ),
    (
        "mlp_has_bias",
        (
            "default False in yaml (upstream True); mlp_bias of the trio sets it. Biases: qkv if add_bias_linear or "
            "qkv_has_bias, and so on."
        ),
        "yaml默认False（上游为True）；三文件的mlp_bias即此项。add_bias_linear或各自开关任一为True则有偏置。",
    ),
    ("hidden_act: swiglu", "implies the gate; gated_linear_unit need not be set.", "隐含门控，无需设置gated_linear_unit。"),
    (
        "gelu",
        "the tanh form if bias_gelu_fusion is on and the layer has a bias (Megatron's default), else erf.",
        "bias_gelu_fusion打开且该层有偏置时为tanh形式（Megatron默认），否则为erf。",
    ),
    (
        "--load",
        "resumes as in Megatron, unless --finetune; in yaml load_checkpoint resumes with resume_training: True.",
        "与Megatron相同会续训，除非--finetune；yaml中load_checkpoint配合resume_training: True续训。",
    ),
    (
        "--save",
        "without it nothing is saved from Megatron arguments, as in Megatron; yaml saves to ./output.",
        "Megatron参数下没有--save则不保存；yaml默认保存到./output。",
    ),
    (
        "--sequence-parallel with tp 1",
        (
            "tp 1 typed over a file's sequence parallelism switches that off with a notice, as Megatron does; both from one "
            "source are an error."
        ),
        "命令行键入tp 1覆盖文件中的序列并行时，与Megatron一样关闭并提示；二者来自同一来源则报错。",
    ),
    (
        "exit_signal_handler",
        "on: SIGTERM saves and ends the run. Megatron's default is off.",
        "默认打开：收到SIGTERM保存后结束；Megatron默认关闭。",
    ),
    (
        "--vocab-size",
        "without padded_vocab_size it is padded as Megatron does; NullTokenizer adds its end-of-document token first.",
        "未设padded_vocab_size时按Megatron方式填充；NullTokenizer先加上文档结束符。",
    ),
    (
        "empty values",
        "`key:` with nothing behind it is null: not set in the trio; in nested yaml it must be allowed for that field. "
        'A flag with an empty value (`--load "$UNSET"`) is an error, unless the flag is ignored anyway.',
        "`key:`后为空即null：三文件中视为未设置；嵌套yaml中须该字段允许。"
        '命令行中值为空的参数（`--load "$UNSET"`）报错，被忽略的参数除外。',
    ),
)
