"""Tensor and sequence parallelism: layers, mappings, loss and random states, under Megatron's and upstream's names."""

from mindspeed_ms.core.tensor_parallel.cell import (
    ParallelCell,
    create_parameter,
    deferred_initialization,
    initialize_parameters,
    place_globally,
)
from mindspeed_ms.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from mindspeed_ms.core.tensor_parallel.data import broadcast_data
from mindspeed_ms.core.tensor_parallel.initialization import init_method_normal, scaled_init_method_normal
from mindspeed_ms.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mindspeed_ms.core.tensor_parallel.linear import (
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from mindspeed_ms.core.tensor_parallel.lora import ColumnParallelLoRA, RowParallelLoRA, add_adapters
from mindspeed_ms.core.tensor_parallel.mapping_cells import (
    AllGatherFromTensorParallelRegion,
    AllToAll,
    AllToAllEven,
    AllToAllHP2SP,
    AllToAllSP2HP,
    CopyToModelParallelRegion,
    GatherFromModelParallelRegion,
    GatherFromSequenceParallelRegion,
    ReduceFromContextParallelRegion,
    ReduceFromModelParallelRegion,
    ReduceScatterToSequenceParallelRegion,
    ReduceScatterToTensorParallelRegion,
    ScatterToModelParallelRegion,
    ScatterToSequenceParallelRegion,
)
from mindspeed_ms.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_context_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mindspeed_ms.core.tensor_parallel.random import (
    checkpoint,
    gather_split_1d_tensor,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    get_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
    split_tensor_into_1d_equal_chunks,
)
from mindspeed_ms.core.tensor_parallel.utils import VocabUtility, divide, split_tensor_along_last_dim
