"""The operations that a stored graph may call.

PyTorch has over two thousand operations. Some read files (`from_file`), write into their arguments, or do not check
the bounds of memory (`fbgemm_*`, most that begin with an underscore). A graph from a file may call none of those: only
PyTorch's core and pointwise operations, the layers of `torch.nn`, and operations that move, create or sum elements.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from bayeslim.compact.ops import CREATION, INDEXING, MOVEMENT, words
from bayeslim.errors import CorruptFile

_LAYERS = words(
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag "
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _pack_padded_sequence "
    "_pad_packed_sequence scaled_dot_product_attention "
    "batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm native_group_norm _weight_norm "
    "_native_batch_norm_legit_no_training dropout feature_dropout alpha_dropout prelu glu softplus mish hardswish "
    "relu6 log_sigmoid softmax log_softmax _softmax _log_softmax _safe_softmax channel_shuffle native_channel_shuffle "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d grid_sampler grid_sampler_2d grid_sampler_3d pad "
    "constant_pad_nd im2col col2im cosine_similarity pairwise_distance one_hot"
)
_ALGEBRA = words(
    "matmul addmm baddbmm einsum mv dot vdot outer sum mean prod amax amin max min var std var_mean std_mean any all "
    "norm linalg_vector_norm median logsumexp cumsum cumprod cummax cummin sort argsort topk argmax argmin "
    "count_nonzero tril triu masked_fill where diag diag_embed meshgrid __and__ __or__ index_add index_copy index_fill"
)
_COPIES = words(
    "to _to_copy type_as contiguous detach alias clone lift_fresh_copy arange linspace zeros_like ones_like full_like "
    "scalar_tensor sym_size sym_numel"
)
_SAFE = MOVEMENT | INDEXING | CREATION | _LAYERS | _ALGEBRA | _COPIES
_UNCHECKED = re.compile(r"_.*|as_strided.*|empty_strided|resize.*|set_.*|.*_backward|.*backward_data")
_SIZES: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in words("getitem add sub mul floordiv truediv mod neg eq ne lt le gt ge and_ or_ not_")
} | {"check": torch._assert, "max": torch.sym_max, "min": torch.sym_min, "float": torch.sym_float}
"""Functions with which graphs compute sizes, check them and index lists."""


def name_of(target: Any) -> str | None:
    """Return the name of a function in the table, or None.

    >>> name_of(torch.ops.aten.linear.default), name_of(torch.ops.aten.from_file.default)
    ('aten.linear.default', None)
    """
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return f"aten.{name}.{target._overloadname}" if namespace == "aten" and _is_safe(target) else None
    return next((f"size.{name}" for name, function in _SIZES.items() if function is target), None)


def function(name: Any) -> Callable[..., Any]:
    """Return the function of this name in the table.

    Raises:
        CorruptFile: if there is none.
    """
    namespace, _, rest = str(name).partition(".")
    if namespace == "size" and rest in _SIZES:
        return _SIZES[rest]
    operation, _, overload = rest.partition(".")
    if namespace == "aten" and re.fullmatch(r"\w+", operation):
        packet = getattr(torch.ops.aten, operation, None)
        if isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads():
            found: torch._ops.OpOverload = getattr(packet, overload)
            if _is_safe(found):
                return found
    raise CorruptFile(f"The file's graph calls {name!r}, which is not in the table of operations that are safe.")


def _is_safe(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name.partition("::")[2]
    if op._schema.is_mutable:
        return False
    common = (torch.Tag.core in op.tags or torch.Tag.pointwise in op.tags) and not _UNCHECKED.fullmatch(name)
    return common or name in _SAFE
