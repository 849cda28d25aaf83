"""All layers of a decoder for up to 8 rows of one new token each, in one kernel. For Hopper.

Contract
    hidden      [m, hidden_size] bfloat16 or float16, contiguous, 1 <= m <= 8: changed in place, by each layer:

                    hidden += o(attention(rotate(qkv(norm(hidden)))))
                    hidden += down(silu_and_mul(gate_up(norm(hidden))))

    layers      of `LayerTable`: weights as engine/layers/linear.py keeps them for a GPU, norms folded, gate and up
                interleaved (ops.fused_product), and the caches of keys and values, of hidden's dtype
    rotation    cos, sin float32 [m, 1, D / 2] as in ops.rope_and_cache
    block_table int32 [table rows, max_blocks], rows int32 [m] of it, seq_lens int32 [m] >= 1: what the row sees, its
                new token included, whose key and value are written to the caches. No other row reads or writes the
                block that they go to (padding rows may share theirs)
    scratch     of `Scratch`: calls that may run at the same time need scratch of their own

Results are rounded to hidden's dtype where separate kernels would do so (ops.fused_product, ops.rotated_decode): qkv, the
rotated heads, the attention's result, the gated product, and hidden after each sum.

The kernel is launched cooperatively with a block for each multiprocessor; described in cuda/decoder_layers.cu.
`supports` tells which shapes it takes. In a CUDA graph all tensors stay and their contents change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import fused_product, jit, rope_and_cache
from engine.ops.paged_decode import LOG2_E, gather, row_stride

MAX_ROWS = 8
WARPS = 8  # that multiply
THREADS = 32 * (WARPS + 4)  # one more warp fetches weights; the others give it their registers
CHUNK = 64  # columns
PITCH_PAD = 64  # bytes between pieces of rows in shared memory
FLIGHTS = 32
SMEM_LIMIT = 227 * 1024
LEAST_BLOCKS = 112  # multiprocessors of a card that this kernel is for
MAX_PARTS = 160  # of a row; blocks that a launch may have
KV_BYTES = 32 * 1024  # of tiles of the cache that a block should have under way
TILE = 16
LAYER_WORDS = 12  # 8-byte words of an entry of the table; as Layer in the kernel


@dataclass(frozen=True)
class Shape:
    """What of a model selects the kernel."""

    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def attended(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return self.attended + 2 * self.num_kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Of a layer's matrices."""
        per_row = self.qkv + self.attended + 3 * self.intermediate_size
        return 2 * self.hidden_size * per_row


def supports(shape: Shape, num_blocks: int, rows: int = MAX_ROWS) -> bool:
    """Whether the kernel takes a model of this shape on a Hopper card of so many multiprocessors, for `rows` rows."""
    sizes = (shape.hidden_size, shape.intermediate_size, shape.attended)
    return (
        shape.dtype in (torch.bfloat16, torch.float16)
        and 1 <= rows <= MAX_ROWS
        and all(size % CHUNK == 0 for size in sizes)
        and shape.head_dim in (64, 128)
        and shape.block_size % TILE == 0
        and shape.num_heads % shape.num_kv_heads == 0
        and shape.num_heads // shape.num_kv_heads <= TILE
        and LEAST_BLOCKS <= num_blocks <= MAX_PARTS
        and rows * shape.num_kv_heads <= num_blocks
        and num_blocks <= min(shape.hidden_size, shape.intermediate_size, shape.qkv)  # lamport.cuh
        and max(sizes) <= 8192
        and Layout.fit(shape).slots >= 2 * FLIGHTS
    )


@dataclass(frozen=True)
class Layout:
    """Of shared memory."""

    piece_chunks: int  # of 64 columns, in a slot of the ring
    slots: int
    kv_stages: int
    smem_bytes: int

    @classmethod
    def fit(
        cls, shape: Shape, least_blocks: int = LEAST_BLOCKS, limit: int = SMEM_LIMIT
    ) -> "Layout":
        """The ring gets what is left. Pieces are chosen for the least waste at the ends of rows."""
        tiles = WARPS * 2 * TILE * row_stride(2 * shape.head_dim)
        kv_stages = max(1, KV_BYTES // tiles)
        area = max(attention_bytes(shape, kv_stages), sum_bytes(shape, least_blocks))
        rest = limit - -(-area // 128) * 128 - 2 * 8 * FLIGHTS
        piece_chunks = min(range(16, WARPS - 1, -1), key=lambda chunks: ring_bytes(shape, chunks))
        pitch = piece_chunks * CHUNK * 2 + PITCH_PAD
        slots = rest // 1024 * 1024 // pitch
        return cls(piece_chunks, slots, kv_stages, limit)


def ring_bytes(shape: Shape, piece_chunks: int) -> int:
    """What a layer's rows would take of the ring, if it held them all."""
    rows = (
        (shape.qkv, shape.hidden_size),
        (shape.hidden_size, shape.attended),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    )
    pieces = sum(n * -(-k // (CHUNK * piece_chunks)) for n, k in rows)
    return pieces * (piece_chunks * CHUNK * 2 + PITCH_PAD)


def sum_bytes(shape: Shape, least_blocks: int) -> int:
    """Of a product's sums, before warps add theirs up (sum_floats in decode_product.cuh)."""
    heights = (
        16 * -(-most_outputs // outputs_of_tile)
        for most_outputs, outputs_of_tile in (
            (-(-shape.qkv // least_blocks), 16),
            (-(-shape.hidden_size // least_blocks), 16),
            (-(-shape.intermediate_size // least_blocks), 8),
        )
    )
    return 4 * WARPS * MAX_ROWS * (max(heights) + 4 + 1)


def attention_bytes(shape: Shape, kv_stages: int) -> int:
    """ATTENTION_BYTES in decode_attention.cuh."""
    head_dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    stride = row_stride(2 * head_dim)
    tiles, sums = WARPS * kv_stages * 2 * TILE * stride, WARPS * group * (head_dim + 8) * 4
    rotated = -(-max(tiles, sums) // 128) * 128
    rest = TILE * stride + 4 * head_dim + 8 * WARPS * group + 4 * group * MAX_PARTS + 16
    return rotated + rest


def variant(
    shape: Shape, least_blocks: int = LEAST_BLOCKS, limit: int = SMEM_LIMIT
) -> jit.VariantSpec:
    layout = Layout.fit(shape, least_blocks, limit)
    defines = {
        jit.scalar_define(shape.dtype): 1,
        "HIDDEN_SIZE": shape.hidden_size,
        "INNER_SIZE": shape.intermediate_size,
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "PIECE_CHUNKS": layout.piece_chunks,
        "SLOTS": layout.slots,
        "KV_STAGES": layout.kv_stages,
        "MAX_PARTS": MAX_PARTS,
        "LEAST_BLOCKS": least_blocks,
        "SMEM_BYTES": layout.smem_bytes,
    }
    return jit.VariantSpec(
        "decoder_layers.cu", "decoder_layers", defines, layout.smem_bytes, archs=("sm_90a",)
    )


@dataclass(frozen=True)
class Layer:
    """Tensors of one layer; biases and qk_norm may be None."""

    qkv: Tensor  # [qkv, hidden_size]
    output: Tensor  # [hidden_size, num_heads * head_dim]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    down: Tensor  # [hidden_size, intermediate_size]
    k_cache: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qk_norm: Tensor | None = None  # [num_heads + num_kv_heads, head_dim]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the kernel's struct Layer."""
        return (
            self.qkv, self.qkv_bias, self.output, self.output_bias, self.gate_up, self.gate_up_bias,
            self.down, self.down_bias, self.qk_norm, self.k_cache, self.v_cache,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerTable:
    """A model's layers, and where the kernel finds them."""

    shape: Shape
    layers: tuple[Layer, ...]
    addresses: Tensor  # int64 [num_layers, LAYER_WORDS], on the device

    @classmethod
    def make(cls, shape: Shape, layers: Sequence[Layer]) -> "LayerTable":
        """Raises ValueError for tensors that the kernel cannot read."""
        device = layers[0].qkv.device
        table = np.zeros((len(layers), LAYER_WORDS), np.int64)
        for i, layer in enumerate(layers):
            check_layer(shape, layer, i)
            for j, tensor in enumerate(layer.tensors()):
                table[i, j] = 0 if tensor is None else tensor.data_ptr()
        return cls(shape, tuple(layers), torch.from_numpy(table).to(device))


def check_layer(shape: Shape, layer: Layer, index: int) -> None:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    cache = (shape.num_kv_heads, shape.block_size, shape.head_dim)
    heads = (shape.num_heads + shape.num_kv_heads, shape.head_dim)
    expected = (
        (shape.qkv, hidden), (shape.qkv,), (hidden, shape.attended), (hidden,), (2 * inner, hidden), (2 * inner,),
        (hidden, inner), (hidden,), heads, cache, cache,
    )  # fmt: skip
    for tensor, sizes in zip(layer.tensors(), expected, strict=True):
        if tensor is None:
            continue
        fits = tuple(tensor.shape[-len(sizes) :]) == sizes and tensor.dtype is shape.dtype
        if not (fits and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
            raise ValueError(
                f"decoder_layers: a tensor of layer {index} is {tuple(tensor.shape)} {tensor.dtype}, strides "
                f"{tensor.stride()}; it must be a contiguous {sizes} of {shape.dtype} at a multiple of 16 "
                "bytes. Take the layers one by one instead"
            )


@dataclass(frozen=True)
class Scratch:
    """What passes from phase to phase.

    The first five are of the kind in which a number that has not come is all ones (cuda/common/lamport.cuh): all of
    it between launches, but for `inner`, which a launch empties at its start. `arrivals` are zero.
    """

    qkv: Tensor  # [MAX_ROWS, qkv]
    middle: Tensor  # [MAX_ROWS, hidden_size]
    inner: Tensor  # [MAX_ROWS, intermediate_size]
    next: Tensor  # [MAX_ROWS, hidden_size]
    attended: Tensor  # [MAX_ROWS, num_heads * head_dim]
    part_o: Tensor  # float32 [items, num_heads * head_dim]
    part_lse: Tensor  # float32 [items, num_heads]
    arrivals: Tensor  # int32 [MAX_ROWS, num_kv_heads]

    @classmethod
    def allocate(cls, shape: Shape, num_blocks: int, device: torch.device) -> "Scratch":
        items = num_blocks // shape.num_kv_heads

        def empty(width: int) -> Tensor:
            words = torch.full((MAX_ROWS, width), -1, dtype=torch.int16, device=device)
            return words.view(shape.dtype)

        return cls(
            empty(shape.qkv),
            empty(shape.hidden_size),
            empty(shape.intermediate_size),
            empty(shape.hidden_size),
            empty(shape.attended),
            torch.zeros(items, shape.attended, dtype=torch.float32, device=device),
            torch.zeros(items, shape.num_heads, dtype=torch.float32, device=device),
            torch.zeros(MAX_ROWS, shape.num_kv_heads, dtype=torch.int32, device=device),
        )

    def is_clean(self) -> bool:
        """As between launches."""
        empties = (self.qkv, self.middle, self.next, self.attended)
        is_empty = all(bool((e.view(torch.int16) == -1).all()) for e in empties)
        return is_empty and not self.arrivals.any()


def decoder_layers(
    hidden: Tensor,
    table: LayerTable,
    rotation: tuple[Tensor, Tensor],
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scratch: Scratch,
    scale: float,
    eps: float,
) -> None:
    """See the module's contract."""
    if hidden.is_cuda:
        num_blocks = multiprocessors(hidden.device.index)
        launch(
            hidden, table, rotation, block_table, rows, seq_lens, scratch, scale, eps,
            variant(table.shape), num_blocks,
        )  # fmt: skip
    else:
        reference(hidden, table, rotation, block_table, rows, seq_lens, scale, eps)


@cache
def multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    hidden: Tensor,
    table: LayerTable,
    rotation: tuple[Tensor, Tensor],
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scratch: Scratch,
    scale: float,
    eps: float,
    spec: jit.VariantSpec,
    num_blocks: int,
    stamps: Tensor | None = None,
    cooperative: bool = True,
) -> None:
    """`stamps`: int64 [num_blocks, num_layers, 5 phases, 5], for a variant with PROFILE (cuda/decoder_layers.cu)."""
    shape, m = table.shape, len(hidden)
    cos, sin = rotation
    assert hidden.is_contiguous()
    assert hidden.shape == (m, shape.hidden_size)
    assert 1 <= m <= min(MAX_ROWS, num_blocks // shape.num_kv_heads)
    assert num_blocks <= min(shape.hidden_size, shape.intermediate_size, shape.qkv)
    assert cos.dtype is sin.dtype is torch.float32
    assert cos.stride(0) == sin.stride(0)
    assert rows.dtype is seq_lens.dtype is block_table.dtype is torch.int32
    args: list[object] = [
        hidden.data_ptr(),
        *(t.data_ptr() for t in vars(scratch).values()),
        table.addresses.data_ptr(),
        np.int32(len(table.layers)),
        np.int32(m),
        block_table.data_ptr(),
        rows.data_ptr(),
        seq_lens.data_ptr(),
        np.int32(block_table.stride(0)),
        cos.data_ptr(),
        sin.data_ptr(),
        np.int32(cos.stride(0)),
        np.float32(scale * LOG2_E),
        np.float32(eps),
    ]
    if stamps is not None:
        args.append(stamps.data_ptr())
    kernel = jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)
    kernel((num_blocks,), (THREADS,), args, cooperative=cooperative)


def reference(
    hidden: Tensor,
    table: LayerTable,
    rotation: tuple[Tensor, Tensor],
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scale: float,
    eps: float,
) -> None:
    """Layer by layer in torch, in float32 with the contract's roundings."""
    shape = table.shape
    cos, sin = rotation
    lens, table_rows = seq_lens.tolist(), rows.tolist()
    newest = seq_lens.long() - 1
    blocks = block_table[rows.long(), newest // shape.block_size].long()
    slots = blocks * shape.block_size + newest % shape.block_size
    for layer in table.layers:
        qkv = fused_product.reference(hidden, layer.qkv, layer.qkv_bias, norm_eps=eps)
        q = rope_and_cache.reference(
            qkv, cos, sin, slots, layer.k_cache, layer.v_cache, shape.num_heads, layer.qk_norm, eps
        )
        attended = torch.empty_like(q)
        for i, (row, length) in enumerate(zip(table_rows, lens, strict=True)):
            keys = gather(layer.k_cache, block_table[row], 0, length)
            values = gather(layer.v_cache, block_table[row], 0, length)
            query = q[i].float().view(shape.num_kv_heads, -1, shape.head_dim)
            weights = torch.softmax(query @ keys.transpose(1, 2) * scale, -1)
            attended[i] = (weights @ values).view(shape.num_heads, -1).to(q.dtype)
        fused_product.reference(
            attended.flatten(1), layer.output, layer.output_bias, hidden, residual=hidden
        )
        inner = fused_product.reference(
            hidden, layer.gate_up, layer.gate_up_bias, norm_eps=eps, gated=True
        )
        fused_product.reference(inner, layer.down, layer.down_bias, hidden, residual=hidden)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """One, where the model is small enough and the cache has its dtype."""
    shape = Shape(
        config.dtype,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.block_size,
    )
    is_plain = config.kv_dtype is config.dtype and not any(config.softcaps)
    if not (is_plain and is_chosen(shape, LEAST_BLOCKS, rows=1)):
        return []
    return [variant(shape)]


MOST_LAYER_BYTES = 90 << 20  # weights of a layer; larger ones are bound by memory as they are


def is_chosen(shape: Shape, num_blocks: int, rows: int = MAX_ROWS) -> bool:
    """Whether this kernel takes less time than one for each part of a layer."""
    return supports(shape, num_blocks, rows) and shape.weight_bytes <= MOST_LAYER_BYTES
