"""The model blocks of the guide (pretrain_gpt), unchanged: a user's own GPTModel on top of the package."""

# fmt: off
# ruff: noqa
# 引入必需的模块
import enum
from mindspore import ops
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.language_model import get_language_model
from mindspeed_ms.legacy.model.transformer import ParallelLMLogits
from mindspeed_ms.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from mindspeed_ms.training.loss_func import LossWithMask
from mindspeed_ms.legacy.model.eos_mask import EosMask
from mindspeed_ms.core.parallel_state import get_context_parallel_rank, get_context_parallel_world_size

# 定义attention mask的类型
class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4

# GPT模型定义
class GPTModel(Module):
    """
    GPT model
    """
    def __init__(self,
                 config,
                 num_tokentypes=0,
                 parallel_output=True,
                 pre_process=True,
                 post_process=True,
                 **kwargs):

        super().__init__(config)
        self.parallel_output = parallel_output
        self.pre_process = pre_process
        self.post_process = post_process
        self.untie_embeddings_and_output_weights = config.untie_embeddings_and_output_weights
        self.fp16_lm_cross_entropy = config.fp16_lm_cross_entropy
        self.seq_length = config.seq_length
        self.compute_dtype = config.compute_dtype
        self.batch_size = config.dataset_config.batch_size
        self.cp_size = get_context_parallel_world_size()
        self.cp_rank = get_context_parallel_rank()

        # 获取eod mask数据
        self.eod = kwargs['eod'] if 'eod' in kwargs else None
        self.reset_position_ids = kwargs['reset_position_ids'] if 'reset_position_ids' in kwargs else False
        if self.eod:
            self.eod_mask = EosMask(self.batch_size, config.seq_length, self.eod, self.reset_position_ids)

        # 获取LLM模型
        self.language_model, _ = get_language_model(config=config,
                                                    encoder_attn_mask_type=AttnMaskType.causal,
                                                    num_tokentypes=num_tokentypes,
                                                    pre_process=self.pre_process,
                                                    post_process=self.post_process,
                                                    add_pooler=False)
        # 后处理部分代码，包括head层和loss计算
        if self.post_process:
            self.parallel_lm_logits = ParallelLMLogits(config=config,
                                                       bias=False,
                                                       compute_dtype=config.compute_dtype)
            self.loss = LossWithMask(VocabParallelCrossEntropy())
        # 流水线并行中embedding层和head层共享权重的功能
        if not self.untie_embeddings_and_output_weights:
            self.initialize_word_embeddings()

    # 流水线并行中需要调用来设置模型的输入
    def set_input_tensor(self, input_tensor):
        """ set input_tensor to model """
        self.language_model.set_input_tensor(input_tensor)

    # GPT模型执行
    def construct(self, tokens, position_ids, attention_mask, loss_mask,
                  retriever_input_ids=None,
                  retriever_position_ids=None,
                  retriever_attn_mask=None,
                  labels=None, tokentype_ids=None, inference_params=None):
        """GPT model construct"""

        if (position_ids is None or attention_mask is None) and self.eod:
            position_ids, attention_mask = self.eod_mask(tokens)

        if self.cp_size > 1:
            seq_dim = 1
            tokens = ops.chunk(tokens, self.cp_size, seq_dim)[self.cp_rank]
            position_ids = ops.chunk(position_ids, self.cp_size, seq_dim)[self.cp_rank]
            loss_mask = ops.chunk(loss_mask, self.cp_size, seq_dim)[self.cp_rank]
            if labels is not None:
                labels = ops.chunk(labels, self.cp_size, seq_dim)[self.cp_rank]

        lm_output = self.language_model(tokens,
                                        position_ids,
                                        attention_mask,
                                        tokentype_ids=tokentype_ids,
                                        retriever_input_ids=retriever_input_ids,
                                        retriever_position_ids=retriever_position_ids,
                                        retriever_attn_mask=retriever_attn_mask,
                                        inference_params=inference_params)

        if self.post_process:
            if self.untie_embeddings_and_output_weights:
                logit_weights = self.language_model.output_layer.weight
            else:
                logit_weights = self.shared_embedding_or_output_weight()
            return post_language_model_processing(self.parallel_lm_logits,
                                                  self.loss,
                                                  lm_output,
                                                  labels,
                                                  logit_weights,
                                                  self.parallel_output,
                                                  self.fp16_lm_cross_entropy,
                                                  loss_mask)

        return lm_output

import mindspore.common.dtype as mstype

def post_language_model_processing(parallel_lm_logits, loss_fn, lm_output, labels, logit_weights,
                                   parallel_output, fp16_lm_cross_entropy, loss_mask):
    """ gpt model post process forward """
    # head层计算
    output = parallel_lm_logits(lm_output, logit_weights, parallel_output)

    if labels is None:
        # [s b h] -> [b s h]
        return output.swapaxes(0, 1).contiguous()

    # [s b] -> [b s]
    output = output.swapaxes(0, 1).contiguous()

    # loss计算
    if fp16_lm_cross_entropy:
        if output.dtype != mstype.float16:
            raise ValueError(f"When fp16_lm_cross_entropy=True, output should be float16, but got {output.dtype}")
        loss = loss_fn(output, labels, loss_mask)
    else:
        loss = loss_fn(output.float(), labels, loss_mask)

    return loss
